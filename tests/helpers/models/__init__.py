"""Tiny models in every form that is loaded, and what compares an S-Part with transformers."""
