"""For each alert, series under which it fires, and nearly the same ones under which it does not.

Values are as promtool writes them: `0+6x10` is 0, 6, 12 … 60, a value a minute.
"""

from typing import NamedTuple


class Case(NamedTuple):
    """One alert. `labels`, `summary`: of the one alert that fires at `minutes` from `fires`."""

    alert: str
    severity: str
    minutes: int
    labels: dict[str, str]
    summary: str
    fires: dict[str, str]
    silent: dict[str, str]  # takes the place of the same series


def _router(name: str, more: str = "") -> str:
    return f'{name}{{job="mesh-router",region="us",instance="r:1"{more and f",{more}"}}}'


def _requests(outcome: str) -> str:
    return _router("mesh_requests_total", f'outcome="{outcome}"')


US = {"region": "us"}
R1 = {"region": "us", "job": "mesh-router", "instance": "r:1"}
FAST = _router("mesh_request_ttft_seconds_bucket", 'le="2.5"')
ALL = _router("mesh_request_ttft_seconds_count")
LATE = {FAST: "0+80x400", ALL: "0+100x400"}
CASES = (
    Case(
        "MeshNoRouterReady", "critical", 5, US, "No router of us takes requests",
        {_router("up"): "0x10", 'up{job="mesh-batch-runner",region="us",instance="b:1"}': "1x10"},
        {_router("up"): "0 0 1 1 1 1"},
    ),
    Case(
        "MeshNoRouterReady", "critical", 5, US, "No router of us takes requests",
        {_router("up"): "1x10", _router("mesh_bus_connected"): "0x10"},
        {_router("mesh_bus_connected"): "0 0 0 1 1 1"},
    ),
    Case(
        "MeshNoReplicaReady", "critical", 9, US, "us has no replica that takes work",
        {_router("mesh_bus_connected"): "1x20", _router("mesh_replicas", 'state="down"'): "2x20",
         _router("mesh_replicas", 'state="full"'): "1 1 _x20"},
        {_router("mesh_replicas", 'state="full"'): "1x10"},
    ),
    Case(
        "MeshNoReplicaReady", "critical", 5, US, "us has no replica that takes work",
        {_router("mesh_bus_connected"): "1x10"},
        {_router("mesh_bus_connected"): "0x10"},  # another alert's
    ),
    Case(
        "MeshRequestsFail", "critical", 20, US, "2% of the requests at us fail",
        {_requests("ok"): "0+98x30", _requests("failed"): "0+1x30",
         _requests("engine_failed"): "0+1x30"},
        {_requests("failed"): "0x30", _requests("engine_failed"): "0+0.5x30",
         _requests("client_gone"): "0+50x30"},
    ),
    Case(
        "MeshFirstTokensLate", "critical", 90, US, "20% of first tokens at us are late",
        LATE, {FAST: "0+80x80 6500+100x400"},  # over again: the last minutes are well
    ),
    Case(
        "MeshFirstTokensOftenLate", "warning", 400, US, "10% of first tokens at us are late",
        {**LATE, FAST: "0+90x400"}, {FAST: "0+99.5x400"},
    ),
    Case(
        "MeshRequestsShed", "warning", 20, US, "us refuses 10% of its requests",
        {_requests("ok"): "0+90x30", _requests("shed"): "0+10x30"},
        {_requests("shed"): "0+4x30"},
    ),
    Case(
        "MeshHoldQueueGrows", "warning", 20, US, "More and more requests are held at us",
        {_router("mesh_hold_queue_length"): "0+5x30"},
        {_router("mesh_hold_queue_length"): "0 40 0 40 0 40 0 40 0 40 0 40 0 40 0 40 0 40 0 40 0"},
    ),
    Case(
        "MeshReplicaLost", "warning", 20, US, "us has 3 replicas, fewer than in the last hour",
        {_router("mesh_replicas", 'state="ready"'): "4x10 3x30"},
        # It adopted two, and gave them back.
        {_router("mesh_replicas", 'state="ready"'): "4x5 6x5 4x30",
         _router("mesh_adopted_replicas", 'of="eu"'): "_x6 2x5 stale"},
    ),
    Case(
        "MeshEngineDown", "warning", 5, US, "1 engines of us do not answer or hang",
        {_router("mesh_replicas", 'state="down"'): "1x10"},
        {_router("mesh_replicas", 'state="down"'): "0 0 0 1 0 0"},
    ),
    Case(
        "MeshEnginePageBroken", "warning", 5, US,
        "2 engines of us answer, but not all of their pages",
        {_router("mesh_replicas_page_broken"): "2x10"},
        {_router("mesh_replicas_page_broken"): "0 2 0 2 2 0"},
    ),
    Case(
        "MeshEngineFails", "warning", 5, US,
        "1 engines of us fail the requests that they are given",
        {_router("mesh_replicas_failing"): "1x10"},
        {_router("mesh_replicas_failing"): "0 1 0 1 1 0"},
    ),
    Case(
        "MeshReplicaLeftOut", "warning", 5, {"region": "us", "replica": "us-0"},
        "us leaves us-0 out: its last answers failed",
        {_router("mesh_replica_left_out", 'replica="us-0"'): "1x10"},
        {_router("mesh_replica_left_out", 'replica="us-0"'): "0 1 0 1 1 0"},
    ),
    Case(
        "MeshPeerLeftOut", "warning", 5, {"region": "us", "peer": "eu"},
        "us leaves eu out: its last answers failed",
        {_router("mesh_peer_left_out", 'peer="eu"'): "1x10"},
        {_router("mesh_peer_left_out", 'peer="eu"'): "0 1 0 1 1 0"},
    ),
    Case(
        "MeshReplicaSlow", "warning", 8, {"region": "us", "replica": "us-0"},
        "us-0 of us answers far slower than its like",
        {_router("mesh_replica_share", 'replica="us-0"'): "0.1x10"},
        {_router("mesh_replica_share", 'replica="us-0"'): "1 0.1 1 0.5 0.6 1"},
    ),
    Case(
        "MeshRegionAdopted", "warning", 5, {"region": "us", "of": "eu"},
        "eu has no router; us serves its replicas",
        {_router("mesh_adopted_replicas", 'of="eu"'): "0x10"},
        {_router("mesh_adopted_replicas", 'of="eu"'): "4 4 stale"},
    ),
    Case(
        "MeshLinkRed", "warning", 5, {"region": "us", "peer": "eu"},
        "us receives nothing from eu",
        {_router("mesh_peer_health", 'peer="eu"'): "0x10"},
        {_router("mesh_peer_health", 'peer="eu"'): "1x10"},
    ),
    Case(
        "MeshBusAway", "warning", 5, R1, "r:1 of us loses its nats-server",
        {_router("mesh_bus_connected"): "0x10"}, {_router("mesh_bus_connected"): "1 1 0 1 1 1"},
    ),
    Case(
        "MeshBusAway", "warning", 9, R1, "r:1 of us loses its nats-server",
        {_router("mesh_bus_connected"): "1 0 1 0 1 1 1 1 1 1"},
        {_router("mesh_bus_connected"): "1 0 1 1 1 1 1 1 1 1"},
    ),
    Case(
        "MeshStoreFails", "warning", 5, US, "The streams of us take no writes",
        {_router("mesh_lease_writes_failed_total"): "0+2x20"},
        {_router("mesh_lease_writes_failed_total"): "0x4 1x16"},
    ),
    Case(
        "MeshOrdersLost", "warning", 5, US,
        "us has lost its store of operators' orders; its routers keep them",
        {_router("mesh_orders_lost"): "1x10"},
        {_router("mesh_orders_lost"): "0 1 0 0 1 0"},
    ),
    Case(
        "MeshGossipStale", "warning", 10, US,
        "Routers of us do not know which prefixes are cached where",
        {_router("mesh_gossip_doubted", 'peer="eu"'): "1x20"},
        {_router("mesh_gossip_doubted", 'peer="eu"'): "1 1 0x20"},
    ),
    Case(
        "MeshGossipStale", "warning", 10, US,
        "Routers of us do not know which prefixes are cached where",
        {_router("mesh_warm"): "0x20"}, {_router("mesh_warm"): "0 1x20"},
    ),
    Case(
        "MeshEventLoopLate", "warning", 20, {"region": "us", "instance": "r:1"},
        "r:1 of us has no CPU left",
        {_router("mesh_loop_late_seconds_bucket", 'le="0.05"'): "0+80x30",
         _router("mesh_loop_late_seconds_bucket", 'le="0.1"'): "0+100x30",
         _router("mesh_loop_late_seconds_bucket", 'le="+Inf"'): "0+100x30"},
        {_router("mesh_loop_late_seconds_bucket", 'le="0.05"'): "0+100x30"},
    ),
    Case(
        "MeshLimitNear", "warning", 10, R1, "r:1 uses 90% of what it may",
        {_router("process_open_fds"): "900x20", _router("process_max_fds"): "1000x20"},
        {_router("process_open_fds"): "700x20"},
    ),
    Case(
        "MeshLimitNear", "warning", 10, R1, "r:1 uses 85% of what it may",
        {_router("process_resident_memory_bytes"): "6.8e9x20"},
        {_router("process_resident_memory_bytes"): "6e9x20"},
    ),
    Case(
        "MeshLimitNear", "warning", 10, {"instance": "a:1", "job": "mesh-agent"},
        "a:1 uses 90% of what it may",
        {'process_resident_memory_bytes{instance="a:1",job="mesh-agent"}': "3.6e9x20"},
        {'process_resident_memory_bytes{instance="a:1",job="mesh-agent"}': "3e9x20"},
    ),
    Case(
        "MeshProcessRestarts", "warning", 20, R1, "r:1 was started 3 times in half an hour",
        {_router("process_start_time_seconds"): "1x4 300x4 600x4 900x10"},
        {_router("process_start_time_seconds"): "1x4 300x20"},
    ),
    Case(
        "MeshBatchJobsLate", "warning", 15, US, "2 batch jobs of us will miss their window",
        {'mesh_batch_jobs_late_now{job="mesh-batch-runner",region="us"}': "2x20"},
        {'mesh_batch_jobs_late_now{job="mesh-batch-runner",region="us"}': "2x8 0x20"},
    ),
    Case(
        "MeshBatchStoreNearlyFull", "warning", 15, {"region": "us", "part": "files"},
        "files of batch jobs at us are 90% full",
        {'mesh_batch_store_bytes{region="us",part="files"}': "90x20",
         'mesh_batch_store_bytes_max{region="us",part="files"}': "100x20",
         'mesh_batch_store_bytes{region="us",part="lines"}': "10x20",
         'mesh_batch_store_bytes_max{region="us",part="lines"}': "100x20"},
        {'mesh_batch_store_bytes{region="us",part="files"}': "80x20"},
    ),
)  # fmt: skip
