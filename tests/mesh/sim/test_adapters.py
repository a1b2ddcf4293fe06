"""LoRA adapters in the twin: loads take their time, and go with the engine's process."""

import pytest

from mesh.core.model.settings import RouterSettings
from mesh.sim.config import EngineCrash, SimAdapters, WorldConfig, WorldInvalid
from mesh.sim.workload import Arrival, RequestNode, Segment, Workload, block_keys
from mesh.sim.world import run
from schemas.ids import RegionId, ReplicaId

US = RegionId("us")
L4 = "l4-llama3.1-8b"


def asked(*adapters: str, every_s: float = 3.0) -> Workload:
    """The same prompt for each of them, one after the other."""
    prompt, answer = (Segment(1, 640),), Segment(2, 20)
    return Workload(
        name="adapters",
        arrivals=tuple(
            Arrival(every_s * place, US, RequestNode(prompt=prompt, answer=answer, adapter=name))
            for place, name in enumerate(adapters)
        ),
    )


def played(workload: Workload, *, most: int = 2, load_s: float = 0.5, replicas=1, **config):
    """The report, and each answer's seconds to its first token with its cached tokens."""
    answers = []

    def watch(sent, end, now) -> None:
        assert sent.first_at is not None, end
        answers.append((sent.first_at - sent.sent_at, end.cached_tokens))

    config = WorldConfig(
        regions={US: [L4] * replicas},
        settings=RouterSettings(policy="mesh"),
        adapters=SimAdapters(names=("a", "b", "c"), most=most, load_s=load_s),
        **config,
    )
    return run(workload, config, watch=watch), answers


def test_the_first_request_for_an_adapter_waits_for_its_load() -> None:
    report, answers = played(asked("a", "a", "", "b"))
    assert report["adapter_loads"] == 2 and report["ok"] == 4
    loads = [ttft_s > 0.5 for ttft_s, _ in answers]
    assert loads == [True, False, False, True]


def test_adapters_share_no_prefix_with_each_other_or_their_model() -> None:
    _, answers = played(asked("a", "b", "", "a", "b", ""))
    assert [cached > 0 for _, cached in answers] == [False, False, False, True, True, True]
    segments = (Segment(1, 64),)
    keys = [block_keys(segments, name) for name in ("", "a", "b")]
    assert len({key for each in keys for key in each}) == sum(map(len, keys))


def test_the_least_recently_used_one_makes_room() -> None:
    report, answers = played(asked("a", "b", "a", "c", "a", "b"))
    assert report["adapter_loads"] == 4  # a, b, c instead of b, b instead of c
    assert [ttft_s > 0.5 for ttft_s, _ in answers] == [True, True, False, True, False, True]


def test_another_process_of_the_engine_has_none() -> None:
    crash = EngineCrash(replica=ReplicaId("us-1"), at_s=4.0, until_s=4.5)
    report, _ = played(asked("a", "a", "a"), faults=(crash,))
    assert report["adapter_loads"] == 2 and report["ok"] == 3


def test_a_crash_during_a_load_loses_no_request() -> None:
    crash = EngineCrash(replica=ReplicaId("us-1"), at_s=0.5, until_s=0.8)
    report, _ = played(asked("a"), load_s=1.0, replicas=2, faults=(crash,))
    assert report["ok"] == 1


@pytest.mark.parametrize("wrong", [{"names": ()}, {"most": 0}, {"load_s": -1.0}])
def test_what_is_no_world(wrong) -> None:
    with pytest.raises(WorldInvalid, match="adapters"):
        SimAdapters(**({"names": ("a",), "most": 1, "load_s": 1.0} | wrong))
