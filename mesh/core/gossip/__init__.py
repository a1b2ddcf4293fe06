"""Prefix gossip: what routers publish, what they receive, and how lost deltas are repaired.

`Gossip` (`gossip.py`) is the router core's interface. It owns what this router publishes
(`publisher.py`), a receiver with its repairs for each origin (`stream_receiver.py`), and what all
origins announce together (`remote_prefixes.py`), which the prefix indexes read. `siblings.py` does
the same among the routers of one region.
"""
