"""The worked example of docs/policies.md: its table is what the policy computes."""

from collections.abc import Sequence
from random import Random

import pytest

from mesh.core.gossip.remote_prefixes import Origin, RemotePrefixes
from mesh.core.model.prompt import Prompt
from mesh.core.model.request import Request
from mesh.core.model.settings import RouterSettings
from mesh.core.policies.base import Choice, Target
from mesh.core.policies.mesh import MeshPolicy
from mesh.core.view.peers import Peer, RoundTripEstimate
from mesh.core.view.replica import Replica
from schemas.decision import CandidateKind
from schemas.listed_replicas import ListedReplicas
from schemas.state import ModelCapacity
from tests.mesh.core.build import MODEL, ROUTER, beat, digest, prompt, request, spot
from tests.programs.studies.tables.markdown import table
from tests.support.pages import ROOT

BLOCK_TOKENS, BLOCKS, HELD_BLOCKS = 100, 60, 50
TERMS = ("rtt", "line", "queue", "prefill", "base", "memory", "others")
HEAD = ("candidate", *TERMS, "cost", "first token in")


def replica(name: str, **fields: object) -> Target:
    fields = {"kv_used_ratio": 0.2, "kv_capacity_tokens": 400_000, "batch_max": None} | fields
    one = Replica(beat(name, **fields), 0.0)
    return Target(name, one.load, CandidateKind.REPLICA, 0.0, one)


def peer() -> Target:
    """eu, 80 ms away. Its router lists one replica."""
    listed = ListedReplicas(
        names=("eu-0",),
        wait_s=(0.1,),
        running=(6,),
        kv_free_tokens=(300_000,),
        prefill_s_per_token=(1e-4,),
        prefill_base_s=(0.05,),
    )
    known = Peer(pings=RoundTripEstimate(0.08), seen_at=0.0)
    capacity = ModelCapacity(ready=1, free=1, wait_s=0.1, running=6.0, listed=(0,))
    known.digests[ROUTER] = digest("eu", models={MODEL: capacity}, replicas=listed)
    return Target("eu", 0, CandidateKind.PEER, 0.08, peer=known)


def example(*names: str) -> Choice:
    """Among all candidates, or these."""
    policy = MeshPolicy(RouterSettings(), Random(1))
    text = "".join(chr(ord("A") + number) for number in range(BLOCKS))
    hashes = prompt(text).hashes

    def asked(key: int, blocks: int) -> Request:
        return request(key, prompt=Prompt(blocks * BLOCK_TOKENS, hashes[:blocks], BLOCK_TOKENS))

    policy.placed(asked(1, HELD_BLOCKS), spot("us-0"), 0.0)
    known, origin = RemotePrefixes(), Origin("eu", ROUTER)
    known.trust(origin, True)
    known.add(origin, hashes[:HELD_BLOCKS], ("eu-0",), (1,) * HELD_BLOCKS)
    policy.indexes[CandidateKind.PEER].announced = known
    targets = [
        replica("us-0", prefill_queued_tokens=8000, running=12),
        replica("us-1", prefill_queued_tokens=0, running=4),
        peer(),
    ]
    among = [one for one in targets if not names or one.name in names]
    return policy.choose(asked(2, BLOCKS), among, 0.0)


def rows(choice: Choice) -> Sequence[Sequence[str]]:
    names = {"eu": "eu (eu-0)"}
    return [
        [
            names.get(one.target.name, one.target.name),
            *(f"{one.terms[f'{term}_s']:.3f}" for term in TERMS),
            f"{one.seconds:.3f}",
            f"{one.seconds - one.terms['others_s']:.3f}",
        ]
        for one in choice.scores
    ]


def test_the_table_of_the_page_is_what_the_policy_computes():
    choice = example()
    assert choice.name == "eu"
    assert table(HEAD, rows(choice)) in (ROOT / "docs/policies.md").read_text()
    assert f"`{choice.reason}`" in (ROOT / "docs/policies.md").read_text()


def test_the_terms_that_the_table_leaves_out_are_zero():
    for one in example().scores:
        assert sum(one.terms[f"{term}_s"] for term in TERMS) == pytest.approx(one.seconds)


def test_without_the_peer_and_then_without_the_idle_replica_it_goes_as_the_page_says():
    assert example("us-0", "us-1").name == "us-1"
    alone = example("us-0")
    assert alone.target is None and alone.waits_for.name == "us-0"
