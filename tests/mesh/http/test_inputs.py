"""What is answered to every input of the clients' port, whole, byte by byte, and cut at random.

`tests/data/http_answers.json` has each input's answers: the first is that to the whole input;
others, where there are any, come if it is cut. After a change that is meant:

    python -m tests.programs.live.http_corpus tests/data/http_answers.json 30
"""

import asyncio
from pathlib import Path

import orjson

from tests.programs.live.http_corpus import FILE_ID, LIMITS, opened
from tests.support import http_corpus as corpus
from tests.support.batch_regions import batch_toml
from tests.support.nats_regions import running_regions
from tests.support.small_mesh import small_mesh

DATA = Path(__file__).parents[2] / "data"
ANSWERS = orjson.loads((DATA / "http_answers.json").read_bytes())
AT_ONCE = 16
INPUTS = corpus.inputs(FILE_ID)


def test_each_input_is_answered_as_known_however_it_is_cut(tmp_path):
    with running_regions(tmp_path, toml=batch_toml(limits=LIMITS)) as regions:
        wrong = asyncio.run(answered_otherwise(regions))
    assert wrong == {}
    assert ANSWERS.keys() == INPUTS.keys()


async def answered_otherwise(regions) -> dict[str, list[str]]:
    """Inputs whose answer is none of those that are known."""
    wrong = {}
    async with small_mesh(regions) as mesh:
        url = await opened(mesh)

        async def check(name: str, one: corpus.Input) -> None:
            known, cut = ANSWERS[name], corpus.cut_at_random(one.sent, name)
            for pieces in (corpus.whole(one.sent), corpus.single_bytes(one.sent), cut):
                got = corpus.outcome(await corpus.exchanged(url, one, pieces), one.heads)
                if got not in known and corpus.essence(got) != corpus.essence(known[0]):
                    wrong[name] = got

        named = list(INPUTS.items())
        for at in range(0, len(named), AT_ONCE):
            await asyncio.gather(*(check(*one) for one in named[at : at + AT_ONCE]))
        router = mesh.routers["us"]
        await mesh.until(lambda: not router.requests.open_requests, "no request to be open")
        assert router.requests.bodies.taken_bytes == 0
    return wrong
