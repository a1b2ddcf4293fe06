"""Routers and agents joined by bytes in memory, as h11's ConnectionPair joins client and server.

Sessions and cores of routers, and agents with relays, outboxes and HTTP clients are the live code.
In place of nats-servers, sockets and the clock stand `wire` (messages that a seed may lose, repeat,
delay and overtake), `engine` (HTTP responses in memory) and `virtual_time` (a loop whose time
jumps). Nothing waits and nothing is left to chance: two runs of one seed are equal.
"""
