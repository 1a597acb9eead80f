"""Foreign engines, seen by what they export: metrics, KV events, and what our own requests to them say."""
