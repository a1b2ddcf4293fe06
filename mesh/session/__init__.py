"""A router's session: connects clients and the bus to the core, without I/O.

The host gives it requests (`Session.admit` to `close`) and what the bus brings (`BusReceiver`:
frames as bytes, or decoded), and gets calls through small protocols (`record.py`): `Bus` sends
messages, `Observer` counts and logs, and `OpenRequest.changed` is called when there may be
more for its client. The live router (`mesh.runtime`) and the twin
(`mesh.sim`) drive the same code.

Rules of this folder: no clock but the given one, no chance but the given tokens, nothing waits.
"""
