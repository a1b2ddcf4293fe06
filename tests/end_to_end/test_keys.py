"""A key's life in a mesh as users start one: `mesh up` with three regions, and its commands."""

import asyncio
import time

import openai
import pytest

from tests.support.mesh_command import mesh_command
from tests.support.mesh_up import REGIONS, mesh_up, write_config

WITHIN_S = 20.0  # 2 s are promised; any process of a test may stand still


async def test_a_key_serves_in_three_regions_until_it_is_revoked(tmp_path):
    config = write_config(tmp_path)
    config.write_text(config.read_text() + "[auth]\nrequired = true\n")
    async with mesh_up(tmp_path, config=config) as mesh:

        async def keys(*words: str) -> tuple[str, str]:
            where = ("--credentials", tmp_path / ".mesh" / "config")
            status, out, err = await mesh_command("keys", *words, *where)
            assert status == 0, err
            return out.strip(), err

        async def ask(region: str, key: str) -> None:
            url = mesh.endpoint(region) + "/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as api:
                hello = [{"role": "user", "content": "hello"}]
                answer = await api.chat.completions.create(model=mesh.model, messages=hello)
                assert answer.choices

        key, about = await keys("create", "--tenant", "acme")
        for region in REGIONS:
            with pytest.raises(openai.AuthenticationError):
                await ask(region, "mesh-guessed")
            await ask(region, key)
        _, told = await keys("create", "--tenant", "acme", "--model", mesh.model)
        assert "not served" not in told
        misspelt, told = await keys("create", "--tenant", "acme", "--model", mesh.model[:-1])
        assert f"did you mean {mesh.model!r}?" in told and misspelt.startswith("mesh-")
        named = about.split()[0]
        told, _ = await keys("revoke", named, named[:6])
        assert told == f"{named}: revoked"
        since = time.monotonic()
        for region in REGIONS:
            async with asyncio.timeout(WITHIN_S):
                with pytest.raises(openai.AuthenticationError, match="revoked"):
                    while True:
                        await ask(region, key)
        print(f"refused in all regions {time.monotonic() - since:.3f} s after the command ended")
