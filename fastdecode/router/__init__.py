"""The front door: one OpenAI-compatible address in front of several S-nodes."""
