"""Tokenizers, chat templates, stop strings and the incremental decoding of tokens to text."""
