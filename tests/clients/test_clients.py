"""Each client does what its users do, against one region of two simulated engines."""

import json
import shutil

import pytest

from tests.clients import install
from tests.clients.commands import SCRIPTS, answers, output
from tests.clients.gateways import MODEL, litellm
from tests.clients.table import WORKS, keep
from tests.programs.bench import aiperf

pytestmark = [pytest.mark.clients, pytest.mark.timeout(400)]
REQUESTS = 60
UNSENT_MAX = 13  # methods whose own checks refuse made-up arguments


async def found_by(client: str, *command: str, **environment: str) -> dict[str, str]:
    """The last line that a script printed, which is kept for the table."""
    lines = (await output(*command, **environment)).strip().splitlines()
    found: dict[str, str] = json.loads(lines[-1])
    keep(client, found)
    return found


def bad(found: dict[str, str]) -> dict[str, str]:
    return {what: r for what, r in found.items() if r != WORKS and not r.startswith("refused: ")}


async def test_every_method_of_openais_client_works_or_is_refused_in_its_form(url):
    python = str(install.programs(install.SDKS) / "python")
    found = await found_by("openai, every method", python, str(SCRIPTS / "openai_walk.py"), url)
    unsent = {method for method, result in found.items() if result.startswith("not sent: ")}
    assert len(unsent) < UNSENT_MAX < len(found) / 20, unsent
    assert bad({method: found[method] for method in found.keys() - unsent}) == {}
    for method in ("chat.completions.create", "responses.create", "embeddings.create",
                   "audio.transcriptions.create", "completions.create", "models.list",
                   "responses.retrieve", "responses.delete", "responses.input_items.list",
                   ):  # fmt: skip
        assert found[method] == WORKS


@pytest.mark.parametrize(
    ("client", "environment", "script", "least"),
    [
        ("AsyncOpenAI", install.SDKS, "openai_streams.py", 1),
        ("anthropic", install.SDKS, "anthropic_client.py", 5),
        ("langchain-openai", install.SDKS, "langchain_client.py", 5),
        ("LiteLLM", install.LITELLM, "litellm_client.py", 4),
    ],
)
async def test_a_client_of_python(url, client, environment, script, least):
    python = str(install.programs(environment) / "python")
    found = await found_by(client, python, str(SCRIPTS / script), url)
    assert len(found) >= least
    assert bad(found) == {}


async def test_litellms_proxy_has_the_mesh_as_its_upstream(url, tmp_path):
    python = str(install.programs(install.SDKS) / "python")
    async with litellm([(MODEL, url)], tmp_path, set_up=False) as gateway:
        await answers(gateway.health)
        script = str(SCRIPTS / "through_proxy.py")
        found = await found_by("LiteLLM's proxy", python, script, gateway.url)
    assert len(found) == 4
    assert bad(found) == {}


async def test_vercels_ai(url):
    node = install.node()
    script = install.NODE / "vercel.mjs"  # modules are found beside the script
    shutil.copy(SCRIPTS / "vercel.mjs", script)
    found = await found_by("Vercel ai", node, str(script), url)
    assert len(found) == 5
    assert bad(found) == {}


async def test_aiperf_unmodified(url, tmp_path):
    program = install.programs(install.AIPERF) / "aiperf"
    await output(
        *(str(program), "profile", "--model", "tiny", "--url", url.removesuffix("/v1")),
        *("--endpoint-type", "chat", "--streaming", "--tokenizer", str(install.TOKENIZER)),
        *("--isl", "128", "--osl", "16", "--concurrency", "4", "--workers-max", "1"),
        *("--request-count", str(REQUESTS), "--random-seed", "1", "--use-server-token-count"),
        *("--ui", "none", "--artifact-dir", str(tmp_path)),
        HOME=str(tmp_path),
    )
    export = next(tmp_path.rglob(aiperf.EXPORT))
    figures = aiperf.parse(export.read_bytes(), REQUESTS)
    assert (figures["answered"], figures["failed"]) == (REQUESTS, 0)
    shutil.copy(export, install.ROOT / "build" / "clients" / "aiperf-report.txt")
    keep("aiperf", {f"{REQUESTS} streams, 4 at once": WORKS})


async def test_guidellm_unmodified(url, tmp_path):
    program = install.programs(install.GUIDELLM) / "guidellm"
    report = tmp_path / "guidellm.json"
    await output(
        *(str(program), "run", "--tokenizer", f"kind=hf_auto,model={install.TOKENIZER}"),
        *("--backend", f"kind=openai_http,target={url.removesuffix('/v1')},model=tiny"),
        *("--data", "kind=synthetic_text,prompt_tokens=128,output_tokens=16"),
        *("--profile", "kind=concurrent,streams=4"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--output", f"kind=json,path={report}"),
        HOME=str(tmp_path),
        HF_HUB_OFFLINE="1",
    )
    text = report.read_text()
    totals = json.loads(text)["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)
    keep("guidellm", {f"{REQUESTS} streams, 4 at once": WORKS})
