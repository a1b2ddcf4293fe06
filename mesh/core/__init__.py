"""The router's brain: pure, synchronous, deterministic.

Theory of operation. Everything that can happen to a router is an event (`events.py`),
everything it can want done is an effect (`effects.py`), and `RouterCore.handle(event, now)`
(`router.py`) turns the one into a list of the other. The live router (`mesh.runtime`) feeds it
bus messages and HTTP requests; a simulator feeds it a virtual world; the code here can't tell.

Rules of this folder: no clock (`now` is seconds on any monotonic scale), no chance but the
injected `random.Random`, no iteration over sets, a limit on every table, no logging: what a
reader wants to know of a decision is in its receipt (`schemas.decision`).
"""
