"""Which rules of the product the worlds reach: transitions, effects, faults, refusals, outcomes."""

from collections import Counter
from typing import Any, get_args

from agents.core import effects as agent_effects
from agents.core.agent import AgentCore
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.requests.record import TRANSITIONS, RequestRecord
from mesh.core.router import HANDLERS, RouterCore
from schemas.exchange import Outcome, Refusal
from schemas.http import Fault


class Reached:
    """Counts for as long as it is entered."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> "Reached":  # noqa: C901
        counts = self.counts
        self._real = RequestRecord._enter, RouterCore.handle, AgentCore.handle
        enter, handle, agent_handle = self._real

        def entering(record: RequestRecord, transition: Any) -> None:
            counts[f"transition {record.state.name} {transition.name}"] += 1
            enter(record, transition)

        def handling(core: RouterCore, event: Any, now: float) -> Any:
            counts[f"event {type(event).__name__}"] += 1
            if isinstance(event, ev.AttemptRefused):
                counts[f"refusal {event.reason}"] += 1
            effects = handle(core, event, now)
            for effect in effects:
                counts[f"effect {type(effect).__name__}"] += 1
                if isinstance(effect, fx.Fail):
                    counts[f"fault {effect.fault.name}"] += 1
                elif isinstance(effect, fx.RefusePeer):
                    counts[f"refusal {effect.reason}"] += 1
            return effects

        def agent_handling(core: AgentCore, event: Any, now: float) -> Any:
            effects = agent_handle(core, event, now)
            for effect in effects:
                counts[f"agent's effect {type(effect).__name__}"] += 1
                if isinstance(effect, agent_effects.Refuse):
                    counts[f"refusal {effect.message.reason}"] += 1
                elif isinstance(effect, agent_effects.SendEnd):
                    counts[f"outcome {effect.outcome}"] += 1
            if (outcome := getattr(event, "outcome", None)) is not None:
                counts[f"outcome {outcome}"] += 1
            return effects

        RequestRecord._enter = entering  # type: ignore[method-assign]
        RouterCore.handle = handling  # type: ignore[method-assign]
        AgentCore.handle = agent_handling  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        RequestRecord._enter, RouterCore.handle, AgentCore.handle = self._real  # type: ignore[method-assign]

    @staticmethod
    def missing(counts: Counter[str]) -> list[str]:
        known = [f"transition {state.name} {how.name}" for state, how in TRANSITIONS]
        known += [f"event {cls.__name__}" for cls in HANDLERS]
        known += [f"effect {cls.__name__}" for cls in get_args(fx.Effect)]
        known += [f"agent's effect {cls.__name__}" for cls in get_args(agent_effects.AgentEffect)]
        known += [f"refusal {one}" for one in Refusal] + [f"outcome {one}" for one in Outcome]
        known += [
            f"fault {one.name}"
            for one in (
                Fault.RESIDENCY,
                Fault.SATURATED,
                Fault.ENGINE_FAILED,
                Fault.NO_REPLICA,
                Fault.DRAINING,
                Fault.DEADLINE,
            )
        ]
        return [one for one in known if one not in counts]
