"""Finding, fetching, loading and checking a model. Only `loader` and what it imports need torch."""
