"""What the twin predicts for each system: `mesh.sim` on the same requests.

A rival is its modelled policy at a central router that pushes blindly and refuses nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from agents.sim.profiles import A100_MISTRAL
from mesh.core.model.settings import RouterSettings
from mesh.replay.tally import RequestOutcome
from mesh.sim.config import CENTRAL, WorldConfig
from mesh.sim.config import MESH as MESH_TOPOLOGY
from mesh.sim.twin_policies import SGLANG_ROUTER, TwinPolicies
from mesh.sim.workload import RequestEnd, SentRequest
from mesh.sim.world import run
from schemas.ids import RegionId
from schemas.settings import BLIND, Pushing
from tests.programs.live.versus.judge import Seen
from tests.programs.live.versus.recorded import Recorded
from tests.programs.live.versus.systems import HOME, MESH, RTT, SGLANG, SMG, VLLM, one_way_s
from tests.programs.studies.tables.client_view import PATIENCE_S
from tests.support.mesh_up import REGIONS

SEEDS = range(5)


@dataclass(frozen=True, slots=True)
class Model:
    """How the twin plays a system."""

    policy: str
    topology: str = f"{CENTRAL}:{HOME}"
    pushing: Pushing = BLIND
    decides_after_s: float = 0.0

    @property
    def text(self) -> str:
        """As the page names it."""
        asks = f", decides after {self.decides_after_s:g} s" if self.decides_after_s else ""
        return f"policy {self.policy}, topology {self.topology}, pushing {self.pushing}{asks}"


MODELS: Mapping[str, Model] = {
    MESH: Model(RouterSettings().policy, MESH_TOPOLOGY, RouterSettings().pushing),
    SGLANG: Model(SGLANG_ROUTER),
    # It places alike, once the farthest engine has rendered the prompt.
    VLLM: Model(SGLANG_ROUTER, decides_after_s=max(2 * one_way_s(region) for region in REGIONS)),
    SMG: Model("smg"),
}


def predict(name: str, recorded: Recorded, replicas: int, seed: int) -> list[Seen]:
    """What each request's client would get, in the order of the plan."""
    workload = recorded.workload()
    found: dict[int, Seen] = {}

    def watch(sent: SentRequest, end: RequestEnd, now: float) -> None:
        found[id(sent.node)] = _seen(sent, end)

    run(workload, _world(MODELS[name], replicas, seed), makers=TwinPolicies(), watch=watch)
    return [found[id(arrival.node)] for arrival in workload.arrivals]


def _world(model: Model, replicas: int, seed: int) -> WorldConfig:
    settings = RouterSettings(policy=model.policy, pushing=model.pushing)
    if model.topology != MESH_TOPOLOGY:
        settings = replace(settings, queue_delay_s_max=0.0, hold_s_max=600.0, hold_max=100_000)
    return WorldConfig(
        regions={RegionId(region): [A100_MISTRAL] * replicas for region in REGIONS},
        rtt=RTT,
        topology=model.topology,
        settings=settings,
        decides_after_s=model.decides_after_s,
        seed=seed,
        speeds_known=False,  # agents that have just been started
    )


def _seen(sent: SentRequest, end: RequestEnd) -> Seen:
    if end.outcome is not RequestOutcome.OK or sent.first_at is None:
        return Seen(None, why=end.reason)
    ttft_s = sent.first_at - sent.sent_at
    if ttft_s > PATIENCE_S:
        return Seen(None, why="patience")
    return Seen(ttft_s, sent.node.prompt_tokens, end.cached_tokens)
