"""The life of one request: what it is, its attempts, what can be hoped for, and its ends."""
