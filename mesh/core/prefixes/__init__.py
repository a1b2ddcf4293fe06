"""Prompts as chained block hashes, and the owners that hold them."""
