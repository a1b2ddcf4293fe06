"""Regions that know each other's prefixes: what is told, what is heard, how holes are mended.

`Gossip` (`gossip.py`) is what the router core talks to. It owns the set that this router tells
(`news.py`, `teller.py`, `repairs.py`), one mirror of each origin's set (`mirror.py`), and what
they come to together (`told.py`), which policies read when they weigh peers.
"""
