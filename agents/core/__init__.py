"""What an agent decides: pure, synchronous, deterministic.

A replica is safe for many uncoordinated routers because its agent decides last: it counts the
requests that it took, reads the engine's load, and refuses beyond it with the fresh load.

An event goes to a rule: a function of the `state`, which it changes and which takes the effects.
Floors; each module imports only from floors below it (a contract in pyproject.toml):

    agent            AgentCore: the table of events and their rules; what is due after each event
    engine_watch     scrapes and probes: what follows for requests when the engine is gone or hangs
    work             work, from its message to the engine: taken, refused, held
    heartbeat        state, load and every field of a heartbeat, and when one is due
    keep_alives      of routers, and losses of the bus
    answers          the engine's answers begin and end; how else requests end
    adapters         LoRA adapters: loads, and who waits for them
    offline_work     the offline requests, and what the engine reports without them
    speed_probe      measure an idle engine's prefill speed
    state            AgentState: every table, no rules

    offline_admission, engine_batch, offline_profile  which offline requests the engine gets
    replica_config   which replica it is, and what its operator decided
    engine_health    does the engine answer, and does it compute?
    engine_load      the engine's queue and cache, from scrapes and responses
    requests         one request's record, states and transitions; the tables of requests
    work_message     the headers of a work message
    prefill_speed, known_speed  the engine's prefill speed: learned; before it has answered
    engine_results, engine_limit  how the last requests at it ended; how many it gets after a 429
    cut_requests     what it may compute of requests that were cut
    loaded_models, model_routes  which models it has loaded; which paths it answers for which
    heartbeat_pace   how soon a heartbeat comes after the last one
    routers          which routers are alive, and which region owns the replica
    effects, events  the interface

Beside these, for the adapters: answer_stream, stream_content, stream_end, stream_errors, usage
(what is read out of an answer's bytes), engine_pages, engine_cache, held_blocks,
held_log, kv_events, kv_stages, name_claim; latency_predictor and slo_profile are parts that the
simulated engine uses too.

The host's loop (`agents.runtime.agent` live, `mesh.sim.replica` in the twin):

    core = AgentCore(config)
    for event in ...:                      # one at a time, in the order in which they happened
        for effect in core.handle(event, now):
            perform(effect)                # in this order; don't wait for a response's end
    and whenever core.wake_at has come:    # read it after each event: it may have moved
        handle(TimerFired(), now)

The host's duties:
- `now` is seconds of a monotonic clock and never decreases;
- scrape the engine again and again, one scrape at a time: `EngineScraped` or `ScrapeFailed`;
- for each `StartRelay` exactly one `RelayEnded`, after its END frame; at most one `RelayBegan`
  before it; for each `ProbeEngine` exactly one `ProbeEnded`, for each `MeasurePrompt` exactly one
  `PromptMeasured`;
- frames of one response go out in the order of the effects;
- at the end `DrainRequested`, `StopRequested`, and `DrainFinished` once every request has ended.
"""
