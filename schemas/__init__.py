"""The language of the bus: ids, subjects, messages, and rules that both ends apply. No I/O.

Everything two processes must agree on is defined here, once.
"""
