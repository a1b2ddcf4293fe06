"""Offline work in a report.

`tokens` are those of answered lines, prompts and answers; `cached` of the prompts' were in an
engine's cache. `tokens_per_gpu_hour` counts prompts and answers over all replicas, busy or not,
from the first client to the last event of the run. `expired` lines were not answered in their
window, `open` ones had no result when the run ended. Agents aborted `preempted` ones at the engine
for online requests, and gave `given_back` ones back before the engine had them; both were placed
again, and `refused` counts agents and regions that had no room. `control_bytes_per_s` is what it
adds on each direction of a link, `us>eu`, beside prompts and answers themselves: what runners
publish, and the headers of lines that go to peers.
"""

import hashlib
from typing import TYPE_CHECKING, Any

from mesh.sim.offline.store import LineOutcome, StoredJob
from mesh.sim.offline.work import OfflineWork
from schemas.ids import RegionId

if TYPE_CHECKING:
    from mesh.sim.world import World

HOUR_S = 3600.0


def offline_report(world: "World", work: OfflineWork, began_at: float) -> dict[str, Any]:
    """The field `offline` of a report. `began_at`: when clients began."""
    jobs = {
        stored.job.name: _job(region, stored, work, began_at)
        for region, store in work.stores.items()
        for stored in store.jobs.values()
    }
    counts = {
        name: sum(job[name] for job in jobs.values())
        for name in ("lines", *(outcome.value for outcome in LineOutcome), "open", "repeated")
    }
    answered = [result for _, result in work.results if result.outcome is LineOutcome.ANSWERED]
    prompt = sum(result.prompt_tokens for result in answered)
    output = sum(result.output_tokens for result in answered)
    run_s = max(0.0, world.queue.now - began_at)
    gpu_hours = len(world.replicas) * run_s / HOUR_S
    by_region: dict[RegionId, int] = dict.fromkeys(world.config.regions, 0)
    for result in answered:
        if result.replica is not None:
            site = world.replicas[result.replica].site
            by_region[site] += result.prompt_tokens + result.output_tokens
    return {
        **counts,
        "tokens": {
            "prompt": prompt,
            "cached": sum(result.cached_tokens for result in answered),
            "output": output,
        },
        "tokens_per_gpu_hour": (prompt + output) / gpu_hours if gpu_hours else None,
        "tokens_by_region": by_region,
        "elsewhere": work.answered_elsewhere,
        "attempts": sum(result.attempts for result in answered),
        "preempted": work.preempted,
        "given_back": work.given_back,
        "refused": work.refused,
        "late_jobs": sorted(work.late_jobs),
        "control_bytes_per_s": {
            f"{source}>{to}": sent / run_s
            for (source, to), sent in sorted(work.link_bytes().items())
            if run_s
        },
        "jobs": jobs,
        "digest": _digest(work),
    }


def _job(region: RegionId, stored: StoredJob, work: OfflineWork, began_at: float) -> dict[str, Any]:
    outcomes = [result.outcome for result in stored.results.values()]
    last_at = max((result.at for result in stored.results.values()), default=None)
    return {
        "region": region,
        "lines": len(stored.lines),
        **{outcome.value: outcomes.count(outcome) for outcome in LineOutcome},
        "open": len(stored.lines) - len(outcomes),
        "repeated": stored.repeated,
        "submitted_s": stored.submitted_at - began_at,
        "window_s": stored.job.window_s,
        "took_s": last_at - stored.submitted_at if stored.is_over and last_at else None,
        "late": stored.job.name in work.late_jobs,
    }


def _digest(work: OfflineWork) -> str:
    """A hash of every line's result, in the order in which they were stored."""
    digest = hashlib.blake2b(digest_size=16)
    for stored, result in work.results:
        name, at_us = stored.job.name, round(result.at * 1e6)
        tokens = result.prompt_tokens, result.cached_tokens, result.output_tokens
        digest.update(f"{name} {result.outcome} {at_us} {result.replica} {tokens}\n".encode())
    return digest.hexdigest()
