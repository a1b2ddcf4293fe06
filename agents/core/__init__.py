"""What an agent decides: pure, synchronous, deterministic.

A replica is safe for many uncoordinated routers because its agent decides last: it counts the
requests that it took, reads the engine's load, and refuses beyond it with the fresh load.

Floors; each module imports only from floors below it (a contract in pyproject.toml):

    agent            AgentCore: every decision, and what a heartbeat holds
    engine_cache, held_log  the engine's KV events through gaps; what is published of them
    speed_probe      measure an idle engine's prefill speed
    held_blocks      which blocks of prompts the engine holds
    offline_work     the offline requests, and what the engine reports without them
    heartbeat        the replica's configuration, and when a heartbeat is due
    offline_admission  which offline requests the engine gets, which are given back
    request_tables   online and offline requests, apart
    engine_batch     what the engine computes, as far as the agent knows
    offline_profile  the profile file: predictor, budget, bounds
    requests         one request's life: its headers, record, states and transitions
    engine_health    does the engine answer, and does it compute?
    engine_load      the engine's queue, speeds and cache, from scrapes and responses
    routers          which routers are alive, and which region owns the replica
    answer_stream    what the agent reads out of a response's bytes; flow control
    name_claim       two agents with one name: which of them leaves
    effects, events  the interface
    engine_results, engine_limit  how the last requests at it ended; how many it gets after a 429
    loaded_models    which models the engine has loaded, and which its agent may ask by itself
    model_routes     which optional paths it answers for which of its models
    kv_events        batches of KV events, and their order
    latency_predictor, slo_profile, offline_queue  parts that the simulated engine uses too

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
