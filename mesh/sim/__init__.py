"""The twin: a discrete-event world around the live cores.

`RouterCore`, `AgentCore` and `EngineSim` decide here exactly as they do live; an event queue with a
virtual clock takes the place of sockets and the bus. Messages take the time of a wide-area link,
engines the time of their profile. Nothing else is modelled twice, so a policy's gain here is its
gain in the live router, as far as the profile is true.

`run` plays a workload in a `world`: `clients` send requests and log their ends, `router` drives a
RouterCore, `replica` and `engine` an AgentCore and an EngineSim. `control_plane` sends what routers
send beside requests. `network` delivers calls instead of messages, `event_queue` is the clock.

Not modelled: inter-token times (one mean per answer, as tokens are no events); CPU time of the
processes; messages larger than the bus allows.

Rules of this folder: no clock but the event queue's, no randomness but seeded `random.Random`s, no
iteration over sets: the same seed gives the same digest under any PYTHONHASHSEED.
"""
