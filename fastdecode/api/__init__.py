"""The HTTP API: OpenAI's endpoints, health and metrics, over an engine and a tokenizer, without the S-Part."""
