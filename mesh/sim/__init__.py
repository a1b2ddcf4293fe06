"""The twin: a discrete-event world around the unchanged cores.

Theory of operation. `RouterCore`, `AgentCore` and `EngineSim` decide here exactly as they do
live; what the live runtime does with sockets and a bus is done here by an event queue with a
virtual clock: messages take the time that a wide-area link takes, engines the time that their
profile says. Nothing else is modelled twice, so what a policy gains here it gains in the live
router, as far as the profile is true.

`run` plays a workload in a `world`: `clients` ask, `router` and `pulse` stand around a RouterCore
as the live runtime does, `replica` and `engine` around an AgentCore and an EngineSim. `network`
carries calls in the place of messages, `event_queue` is the clock, `ledger` counts every end.

What is left out. Tokens are no events, so inter-token times are known as one mean per answer.
Processes take no time of their own: a decision, a parse, a write cost nothing but the bus and
HTTP delays in `network`. A region has one router. Bodies are never too large for one message.

Rules of this folder: no clock but the event queue's, no chance but seeded `random.Random`s, no
iteration over sets: the same seed gives the same digest under any PYTHONHASHSEED.
"""
