"""Worlds from seeds: whole routers and agents in virtual time, where every part fails, and a judge.

What runs is the live code of both processes, from HTTP to HTTP. In place of the clock, sockets,
nats-servers and engines stand `loop`, `sockets`, `bus` and `engine`. `world` makes a world of a
seed, as lines of text; `stage` plays them; `judge` knows what clients, engines and operators saw,
and what promises that breaks. `shrink` makes a failing world small, `planted` proves the judge's
sight, and `python -m tests.seeds` runs many.
"""
