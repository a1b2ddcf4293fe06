"""The twin: a discrete-event world around the unchanged cores.

Theory of operation. `RouterCore`, `AgentCore` and `EngineSim` decide here exactly as they do
live; what the live runtime does with sockets and a bus is done here by an event queue with a
virtual clock: messages take the time that a wide-area link takes, engines the time that their
profile says. Nothing else is modelled twice, so what a policy gains here it gains in the live
router, as far as the profile is true.

Rules of this folder: no clock but the event queue's, no chance but seeded `random.Random`s, no
iteration over sets: the same seed gives the same digest under any PYTHONHASHSEED.
"""
