"""fastdecode: LLM serving with attention and the KV-cache apart from everything that has weights."""

__version__ = "0.1.0"
