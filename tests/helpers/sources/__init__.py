"""The repository's own files: where they stand, what they include and import, and libraries made from them."""
