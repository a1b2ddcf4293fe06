"""What an agent decides: pure, synchronous, deterministic.

`AgentCore.handle(event, now) -> effects` is the whole interface. The runtime turns the world
(bus messages, engine readings, relay results, signals) into events and performs the effects;
the same core can be driven by a simulator. Rules of this folder: no awaiting, no clock but
`now` (seconds of a monotonic clock), a bound on every table.

Theory of operation. A replica is safe for many uncoordinated routers because its agent has the
last word: it counts what it took (`answers`), knows what its engine holds (`reading`), calls
itself full by one rule (`load`) and refuses with its fresh load beyond that. Everything else is
bookkeeping so that each answer ends exactly once: `work` reads the headers, `bodies` puts
large bodies together, `routers` notices askers that died, `health` engines that died.
`prefill` and `served` learn speeds from the answers that passed. `window`, `stream` and
`usage` are the relay's pure parts.
"""
