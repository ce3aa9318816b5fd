"""The activation region and the links that carry it."""
