"""The engine's HTTP server: OpenAI-compatible API, event stream, metrics, control."""

VERSION = "0.1.0"
