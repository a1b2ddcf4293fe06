"""Which lines of batch jobs are handed out, when, and to which replica or region.

`OfflineCore.handle(event, now)` (`core`) is a batch runner's `decide`, as `RouterCore.handle` is a
router's; the live runner and the twin run the same.

The host's duties, beside those of `mesh.core` for attempts (`AttemptProgressed`, `PlacedByPeer`,
then one of `AttemptRefused`, `AttemptFailed`, `AnswerEnded`), `Tick`, `HeartbeatSeen` of this
region's replicas, `LeaseHeard` of this region's lease, `BusLost` and `BusReturned`, `Drain` and
`DrainOver`:

1. `JobSeen` for each job in progress, and again whenever its record changes; `JobEnded` once it is
   cancelled, over or gone. The host keeps job records and counts results.
2. `FetchLines` is answered by one `LinesFetched`. The host keeps bodies by line key, and reports
   lines acknowledged as in progress until they are settled or released.
3. Every line that was fetched ends in exactly one `SettleLine` or `ReleaseLine`. After SettleLine
   the host stores the result, acknowledges the line and reports `LineStored`; until then the line
   keeps its place in the window, so a store that is full stops the fetching. A line of which a
   result is found stored already is reported as stored all the same.
4. An attempt is `OpenLine`, then `Dispatch` or `Forward`, then `CloseLine`; `CancelAttempt` may
   come before that. The host opens a request under the line's key at OpenLine and closes it at
   CloseLine. Of an answer that is longer than flow control lets through at once the host takes
   bytes as they come.
5. A peer's request (`RequestArrived` with `answer_inbox`) has `offline` and `answer_tokens` set. It
   ends here with `Dispatch` or `RefusePeer`; `TellLost` may follow.
6. `AttemptFailed.preempted` is set where the agent's END says PREEMPTED.
7. `OfflineStateSeen` for each message on `offline_state`, of its own region too.
8. `SaveForecast` keeps a forecast; at the start, `ForecastRestored` brings it back. A file that
   can't be read is no reason not to start.
9. `Drain` when the process is asked to end: what waits is released at once, what runs may end.
   `DrainOver`, or the limit of the settings, releases the rest. `is_idle`: nothing is left.

The modules:

    events, effects, settings
    state           the tables that all of the following read and write
    lines           the states of a line, with one writer; the window's bounds
    queues          whose turn it is: deadlines, fairness
    prefixes        which of a job's lines a place gets, by prefix; which replica has which prefix
    jobs            the jobs in progress, what to fetch, models that no replica serves
    backoff         pauses of places after refusals and failures
    room            tokens that the region's replicas would take now
    line_regions    the peers: how far they are believed, prices, residency
    line_placement  lines to replicas, to peers, and with online priority
    attempts        an attempt's course and its ends
    peer_lines      lines that peers send here
    forecast        load by time of day
    capacity        speeds, measured and expected
    deadlines       when a job will end, and when its lines are raised to online priority
    report          what is published every second
    core            which function takes which event; the timer
"""
