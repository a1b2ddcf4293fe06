"""Prefix gossip: what routers announce, what they receive, and how lost deltas are repaired.

`Gossip` (`gossip.py`) is the router core's interface. It owns the set that this router announces
(`outgoing_prefixes.py`, `publisher.py`), one receiver and its repairs for each origin
(`stream_receiver.py`), and what all origins announce together (`remote_prefixes.py`), which the
prefix indexes read. `siblings.py` and `common_index.py` do the same among routers of one region.
"""
