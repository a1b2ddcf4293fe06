"""A replica's engine begins to serve another model under load: no answer is of a wrong one."""

import asyncio
from collections import Counter

from tests.support.scripted_engine import event, opened, scripted_engine
from tests.support.small_mesh import chat, client, small_mesh

CLIENTS, SWAPS = 20, 6


def names(engine, model):
    """Answers in several events, each of them the model's name, whatever was asked for: an engine
    that is asked for a model that it has not says so, but some don't read the name at all."""

    async def behaviour(request, body):
        stream = await opened(request)
        for _ in range(3):
            await stream.write(event(model))
            await asyncio.sleep(0.002)
        await stream.write(b"data: [DONE]\n\n")
        return stream

    engine.model, engine.behaviour = model, behaviour


async def test_an_answer_is_of_the_model_that_was_asked_for_or_an_error(nats_server):
    async with (
        scripted_engine("a") as stays,
        scripted_engine("a") as changes,
        small_mesh({"us": nats_server}) as mesh,
        client() as session,
    ):
        names(stays, "a")
        names(changes, "a")
        await mesh.router("us")
        await mesh.agent("us", "us-0", stays)
        await mesh.agent("us", "us-1", changes)
        await mesh.until_ready_of("us", "a", 2)
        seen, is_over = Counter(), asyncio.Event()

        async def ask(model):
            url = mesh.urls["us"] + "/v1/chat/completions"
            while not is_over.is_set():
                body = chat(stream=True) | {"model": model}
                async with session.post(
                    url, json=body, headers={"x-mesh-timeout-s": "5"}
                ) as answer:
                    text = await answer.text()
                if answer.status == 200 and "error" not in text:
                    said = {name for name in ("a", "b") if f'"content":"{name}"' in text}
                    seen[model, "".join(sorted(said))] += 1
                else:
                    seen[model, "error"] += 1
                    await asyncio.sleep(0.01)

        clients = [asyncio.create_task(ask("ab"[number % 2])) for number in range(CLIENTS)]
        for number in range(SWAPS):
            model = "ba"[number % 2]
            await changes.stop()
            names(changes, model)
            await changes.start()
            await mesh.until_ready_of("us", "b", int(model == "b"))
            done = seen[model, model]
            await mesh.until(lambda: seen[model, model] > done + 20, f"answers of {model}")  # noqa: B023
        is_over.set()
        await asyncio.gather(*clients)
        assert seen["a", "a"] and seen["b", "b"]
        assert seen["a", "b"] == seen["b", "a"] == 0, seen
