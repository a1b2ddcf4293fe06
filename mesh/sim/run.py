"""The twin as a function: a workload and a world in, a report out.

The report has the fields of `mesh replay`'s out file. What a twin adds:

- `decisions`, `decisions_per_s`: requests that routers decided on, and that number over the
  seconds spent in `RouterCore.handle` for it by the clock `perf`; null without one.
- `gpu_busy_s`: seconds in which an engine had a batch, summed over replicas, warm-up included.
- `batch_occupancy`: how full batches were while engines were busy (`mesh.sim.engine`).
- `forwarded`: requests that a replica of a peer region answered.
- `trie_bytes_per_s`: prefix gossip over each link's directions, `us>eu`, over the whole run.
- `digest`: a hash of every request's end. Equal digests, equal runs.
"""

from collections.abc import Callable

from mesh.core.policies import Makers
from mesh.replay.report import Report
from mesh.sim.config import WorldConfig
from mesh.sim.ledger import Watch
from mesh.sim.workload import Workload
from mesh.sim.world import World


def run(
    workload: Workload,
    config: WorldConfig,
    *,
    progress: Callable[[int, float], None] | None = None,
    perf: Callable[[], float] | None = None,
    makers: Callable[[World], Makers] | None = None,
    watch: Watch | None = None,
) -> Report:
    """Play a workload in a twin to its end.

    `progress` is told requests ended and virtual seconds, once a virtual second. `perf` is a
    wall clock (`time.perf_counter`); all else in the report is the same in every run. `makers`:
    policies that may see the whole world, for a bound that no router could reach. `watch` is told
    of every reported end, with the world's time: for curves that the report has no place for.
    """
    world = World(workload, config, perf=perf, makers=makers)
    world.ledger.watch = watch
    world.run(progress)
    return report(world, workload)


def report(world: World, workload: Workload) -> Report:
    """What a finished world came to."""
    ledger, meter, config = world.ledger, world.meter, world.config
    assert ledger.asked == ledger.ended, "a request was lost or counted twice"
    engines = [replica.engine for replica in world.replicas.values()]
    samples = sum(engine.occupancy_samples for engine in engines)
    occupancy = sum(engine.occupancy_sum for engine in engines)
    return ledger.report(
        {
            "decisions": meter.decisions,
            "decisions_per_s": meter.decisions / meter.seconds if meter.seconds else None,
            "gpu_busy_s": sum(engine.busy_s for engine in engines),
            "batch_occupancy": occupancy / samples if samples else None,
            "forwarded": ledger.forwarded,
            "trie_bytes_per_s": {
                f"{source}>{to}": sent / world.queue.now
                for (source, to), sent in sorted(world.trie_links.sent_bytes.items())
            },
            "warm_ups": _warm_ups(world),
            "digest": ledger.digest(),
            "policy": config.settings.policy,
            "topology": config.topology,
            "pushing": str(config.settings.pushing),
            "seed": config.seed,
            "replicas": {region: len(fleet) for region, fleet in config.regions.items()},
            "workload": {"name": workload.name, **workload.facts},
        }
    )


def _warm_ups(world: World) -> dict[str, float]:
    """What warming came to, over all routers that are up."""
    found = [router.core.warming for crew in world.crews.values() for router in crew if router.core]
    return {
        "begun": sum(one.counts.begun for one in found),
        "ended": sum(one.counts.ended for one in found),
        "stopped": sum(one.counts.stopped for one in found),
        "failed": sum(one.counts.failed for one in found),
        "guests": sum(one.counts.guests for one in found),
        "tokens": sum(one.tokens for one in found),
        "idle_s": sum(one.budget.idle_s for one in found),
        "spent_s": sum(one.budget.spent_s for one in found),
    }
