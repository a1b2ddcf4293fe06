"""The twin: a discrete-event world around the live cores.

`RouterCore`, `AgentCore` and `EngineSim` decide here exactly as they do live; an event queue with a
virtual clock takes the place of sockets and the bus. Messages take the time of a wide-area link,
engines the time of their profile. Nothing else is modelled twice, so a policy's gain here is its
gain in the live router, as far as the profile is true.

`run` plays a workload in a `world`: `clients` send requests, `router` drives a RouterCore,
`replica` and `engine` an AgentCore and an EngineSim. `network` delivers calls in the place of
messages, `event_queue` is the clock, `request_log` counts and hashes every request's end.

Not modelled: inter-token times (one mean per answer, as tokens are no events); CPU time of the
processes; messages larger than the bus allows.

Rules of this folder: no clock but the event queue's, no randomness but seeded `random.Random`s, no
iteration over sets: the same seed gives the same digest under any PYTHONHASHSEED.
"""
