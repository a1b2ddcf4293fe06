"""The language of the bus: ids, subjects, messages. No behaviour, no I/O.

Everything two processes must agree on is defined here, once.
"""
