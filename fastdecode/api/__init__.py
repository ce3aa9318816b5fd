"""The OpenAI-compatible HTTP API. Knows the engine, never the S-Part."""
