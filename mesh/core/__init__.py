"""The router's decisions: pure, synchronous, deterministic.

Whatever can happen to a router is an event (`model.events`), whatever it requires done is an effect
(`model.effects`), and `RouterCore.handle(event, now)` (`router`) turns an event into a list of
effects. The live router and the twin run the same core; a recording replays it.

The host's loop:

    core = RouterCore(RouterState(region=…, router=…, epoch=…, settings=…, dice=Random(seed), …))
    while event := next_event():            # one at a time, in the order in which they happen
        for effect in core.handle(event, clock()):
            execute(effect)                 # in this order, before the next event

What a new request's decision leaves to be learned, such as that its replica holds its prompt from
now on, is done first thing in the next `handle`. A host that can't wait calls `finish`.

The host's duties:

1. `now` is seconds on any clock that never goes back; `dice` is the only source of chance; `epoch`
   rises with every start of the same router.
2. `Tick` every 50 ms. All that depends on time happens then: timeouts, losses, gossip, leases.
3. `RequestArrived` once per request, with a key that no other request of this router has. The host
   keeps the body, and drops it when the request ends.
4. An attempt begins with `Dispatch` or `Forward`. The host reports its course by key and
   attempt: `AttemptProgressed` for frames (at least every 2 s while they come), `PlacedByPeer`,
   then one of `AttemptRefused`, `AttemptFailed` or `AnswerEnded`; `AnswerStarted` when the client
   is sent its first byte. Reports of an earlier attempt may come late; they are ignored.
5. `ClientGone` if the client hangs up first. Each request ends once: by `AnswerEnded` or
   `ClientGone` from the host, or by `Fail` or `PassEngineError` from here. A peer's request ends
   when it is dispatched or refused (`RefusePeer`). After the end of one whose engine counted no
   tokens the host tells its estimate (`CostEstimated`).
6. Heartbeats, digests, round trips, prefix deltas and lease writes are reported as they arrive,
   after their senders and sizes were checked; `BusLost` and `BusReturned` when the router's own bus
   connection changes.
7. `SettingsChanged` with checked settings, when others are to hold, and `MoveStreams` when streams
   are to leave other replicas.
8. `Drain` when the process is asked to end, `DrainOver` when it won't wait any longer.

The packages are floors; each imports only those above it in this list (an import-linter contract):

    model         events, effects, settings, requests, prompts
    prefixes      the prefix index
    view          the state of replicas, peers and the bus connection as this router sees it
    gossip        prefixes announced to, and received from, other routers
    policies      one rule of preference a file
    placement     the decision, its candidates, its receipt, residency
    requests      a request's record and states, the hold queue
    membership    leases, adoption of regions, the region's digest
    state         what a router knows: its tables, without a rule
    lifecycle     attempts, admission, timeouts, when held requests are tried
    offline       lines of batch jobs: the core of a batch runner, beside that of a router
    cluster_events, router, recording

In all of them: no iteration over sets, a limit on every table, no logging.
"""
