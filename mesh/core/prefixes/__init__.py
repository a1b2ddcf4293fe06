"""Prompts as chained block hashes, and who is believed to hold them."""
