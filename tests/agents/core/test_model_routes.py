"""Which optional paths an engine answers for which model: learned, bounded, forgotten."""

import pytest

from agents.core import events
from agents.core.model_routes import LACKING_S, RETRY_S, TRIES_MAX, ModelRoutes, is_about_model
from schemas.engine_routes import OPTIONAL_PATHS
from schemas.exchange import Refusal
from schemas.http import EMBEDDINGS, MESSAGES, RERANK
from schemas.state import LACKING_MODELS_MAX, decode_heartbeat, encode_state
from tests.agents.core.bench import IDLE, MODEL, Bench

ALL = tuple(sorted(OPTIONAL_PATHS))


def routes(*names: str, on_demand=True) -> ModelRoutes:
    found = ModelRoutes()
    found.listed(names or ("chat", "emb"), on_demand=on_demand, now=0.0)
    return found


def test_an_engine_of_which_all_is_known_says_nothing_more() -> None:
    found = routes("chat", on_demand=False)
    assert found.known().unknown == ALL
    for path in ALL:
        found.told(path, has=path == EMBEDDINGS)
    assert found.known() is None and found.paths == (EMBEDDINGS,) and not found.to_ask(9e9)


def test_an_answer_holds_for_the_model_that_was_asked() -> None:
    found = routes()
    for path in ALL:
        found.told(path, has=path in (EMBEDDINGS, MESSAGES))
    assert found.paths == () and found.known().unknown == (EMBEDDINGS, MESSAGES)
    assert found.answered("emb", EMBEDDINGS, has=True, now=1.0)
    assert found.answered("chat", MESSAGES, has=True, now=1.0)
    assert found.answered("emb", MESSAGES, has=False, now=1.0)
    assert not found.answered("emb", MESSAGES, has=False, now=2.0), "it is known"
    assert found.paths == (EMBEDDINGS, MESSAGES)
    assert found.known().unknown == (EMBEDDINGS,), "of the chat model"
    assert found.known().lacking == {"emb": (MESSAGES,)}
    found.listed(("new", "emb", "chat"), on_demand=True, now=3.0)  # a pull
    assert found.paths == (EMBEDDINGS, MESSAGES) and found.known().lacking == {"emb": (MESSAGES,)}
    found.listed(("new", "chat"), on_demand=True, now=4.0)
    assert found.known().lacking == {}
    assert not found.answered("gone", MESSAGES, has=False, now=4.0)


def test_what_a_client_s_request_told_is_forgotten_after_a_time() -> None:
    found = routes()
    found.answered("emb", MESSAGES, has=False, now=1.0)
    found.listed(("chat", "emb"), on_demand=True, now=LACKING_S)
    assert found.known().lacking == {"emb": (MESSAGES,)}
    found.listed(("chat", "emb"), on_demand=True, now=1.0 + LACKING_S)
    assert found.known().lacking == {} and MESSAGES in found.known().unknown


def test_an_engine_in_trouble_is_asked_a_few_times_and_then_by_clients() -> None:
    found, now, given_up = routes("chat", on_demand=False), 0.0, []
    for _ in range(TRIES_MAX):
        assert RERANK in found.to_ask(now)
        given_up.append(found.told_nothing(RERANK, now))
        assert RERANK not in found.to_ask(now)
        now += RETRY_S
    assert given_up == [False] * (TRIES_MAX - 1) + [True] and RERANK not in found.to_ask(9e9)
    assert found.learns(RERANK) and RERANK in found.known().unknown
    found.answered("chat", RERANK, has=False, now=now)
    assert RERANK not in found.known().unknown
    found.restarted()
    assert RERANK in found.to_ask(now)


def test_a_heartbeat_names_only_so_many_models() -> None:
    names = [f"m{number:04}" for number in range(3 * LACKING_MODELS_MAX)]
    found = routes(*names)
    for name in names:
        for path in ALL[:-1]:
            found.answered(name, path, has=False, now=1.0)
    found.answered(names[0], ALL[-1], has=True, now=1.0)
    known = found.known()
    assert len(known.lacking) <= LACKING_MODELS_MAX and set(known.unknown) == {ALL[-1]}
    found.answered("m0001", ALL[0], has=True, now=1.0)
    assert len(found.known().lacking) == LACKING_MODELS_MAX


@pytest.mark.parametrize(
    ("body", "is_model"),
    [
        (b'{"error":{"message":"model \'x\' not found"}}', True),
        (b'{"message":"The model `x` does not exist.","code":404}', True),
        (b'{"error":{"code":"model_not_found"}}', True),
        (b'{"detail":"Not Found"}', False),
        (b"404 page not found", False),
        (b"", False),
    ],
)
def test_a_404_about_the_model_says_nothing_of_the_path(body, is_model) -> None:
    assert is_about_model(body) is is_model


def scraped(bench: Bench, found: ModelRoutes) -> None:
    names, paths = (MODEL, "emb"), found.paths
    bench.feed(events.EngineScraped(bench.now, IDLE, names, paths=paths, routes=found.known()))
    bench.tick(0.05)  # less than from one heartbeat to the next


def test_an_agent_takes_what_nothing_contrary_is_known_of_and_says_so_at_once() -> None:
    bench, found = Bench(), routes(MODEL, "emb")
    for path in ALL:
        found.told(path, has=path in (EMBEDDINGS, MESSAGES))
    scraped(bench, found)
    assert bench.beats[-1].routes.unknown == (EMBEDDINGS, MESSAGES)
    taken = bench.work(1, **{"Mesh-Path": MESSAGES})
    assert [type(effect).__name__ for effect in taken] == ["StartRelay"]
    found.answered(MODEL, MESSAGES, has=False, now=1.0)
    scraped(bench, found)
    assert bench.beats[-1].routes.lacking == {MODEL: (MESSAGES,)}
    [refused] = bench.work(2, **{"Mesh-Path": MESSAGES})
    assert refused.message.reason == Refusal.WRONG_MODEL
    [refused] = bench.work(3, **{"Mesh-Path": RERANK})
    assert refused.message.reason == Refusal.WRONG_MODEL
    assert decode_heartbeat(encode_state(bench.beats[-1])) == bench.beats[-1]


def test_an_ordinary_heartbeat_has_not_a_byte_more() -> None:
    bench = Bench()
    bench.read()
    data = encode_state(bench.beats[-1])
    assert b"routes" not in data and data.endswith(b'"kv":null}')
    assert decode_heartbeat(data) == bench.beats[-1]
