"""What a router answers to every input of the clients' port, however it is cut.

    python -m tests.programs.live.http_corpus OUT.json [CUTS]

Writes what tests/mesh/http/test_inputs.py holds routers to.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

import orjson

from infra.tenant_table import Caller, key_hash
from mesh.batch.records import repeated_id
from tests.support import http_corpus as corpus
from tests.support.batch_regions import batch_toml
from tests.support.nats_regions import NatsRegions, running_regions
from tests.support.scripted_engine import say, scripted_engine
from tests.support.small_mesh import PATIENT, SmallMesh, small_mesh

LIMITS = (
    "[batch]\nfiles_mib = 64\nresults_mib = 64\nlines_mib = 256\nfile_mib_max = 8\n"
    "files_max = 50000\n"
)
KEYS = {key_hash(corpus.KEY): Caller(tenant="acme")}
AT_ONCE = 16
FILE_ID = repeated_id("file-", "acme", corpus.FILE_KEY)


async def opened(mesh: SmallMesh, engine_count: int = 1) -> str:
    """The router that answers: its address, once it is ready."""
    url = await mesh.router("us", keys=KEYS, cors_origins=(corpus.ORIGIN,), **PATIENT)
    engine = await mesh.stack.enter_async_context(scripted_engine())
    engine.behaviour = say("a ", "b ", "c")
    await mesh.agent("us", "us-0", engine)
    await mesh.until_ready("us", engine_count)
    door = mesh.routers["us"]._batch
    await mesh.until(lambda: door._store is not None, "the store")
    upload = corpus.inputs(FILE_ID)["upload again"]
    await corpus.exchanged(url, upload, [upload.sent])
    return url


async def answered(regions: NatsRegions, cuts: int) -> dict[str, list[list[str]]]:
    """The answers to each input: the first is that to the whole of it."""
    results = {}
    async with small_mesh(regions) as mesh:
        url = await opened(mesh)
        for name, one in corpus.inputs(FILE_ID).items():
            ways = [corpus.whole(one.sent), corpus.single_bytes(one.sent)]
            ways += [corpus.cut_at_random(one.sent, f"{name} {n}") for n in range(cuts)]
            found: list[list[str]] = []
            for at in range(0, len(ways), AT_ONCE):
                now = (corpus.exchanged(url, one, way) for way in ways[at : at + AT_ONCE])
                found += [corpus.outcome(got, one.heads) for got in await asyncio.gather(*now)]
            whole, *others = found
            differ = sorted(set(map(tuple, others)) - {tuple(whole)})
            results[name] = [whole, *map(list, differ)]
    return results


def main(out: str, cuts: int) -> None:
    with (
        tempfile.TemporaryDirectory() as name,
        running_regions(Path(name), toml=batch_toml(limits=LIMITS)) as regions,
    ):
        results = asyncio.run(answered(regions, cuts))
    Path(out).write_bytes(orjson.dumps(results, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3)
