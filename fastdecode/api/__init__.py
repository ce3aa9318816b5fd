"""The HTTP API: OpenAI's endpoints, health and metrics, over an engine and a tokenizer. It knows nothing of the
S-Part.
"""
