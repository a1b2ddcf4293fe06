"""One answer that a replica of the twin computes."""

from dataclasses import dataclass

from agents.core.kv_stages import KvStage
from mesh.sim.session_host import SessionHost
from mesh.sim.workload import SentRequest
from schemas.kv_transfer import KvRole


@dataclass(slots=True)
class RunningAnswer:
    inbox: str
    request: SentRequest
    receiver: SessionHost
    number: int  # in the engine
    last_message_at: float
    offline: bool  # a line of a batch job: no stream
    cached_tokens: int = 0
    predicted_tokens: int = 0  # of its prompt, that its router took for cached
    stage: KvStage | None = None  # that is computed here
    began: bool = False

    @property
    def is_prefill(self) -> bool:
        return self.stage is not None and self.stage.role is KvRole.PREFILL
