import orjson
import pytest

from tests.programs.bench.request_bodies import CHARS_PER_TOKEN, request_body


@pytest.mark.parametrize("tokens", [200, 4_000, 100_000])
def test_a_prompt_has_the_requested_length(tokens):
    body = orjson.loads(request_body(tokens, 32, 5).body(7))
    chars = sum(len(message["content"]) for message in body["messages"])
    assert chars == pytest.approx(tokens * CHARS_PER_TOKEN, rel=0.01)


def test_prompts_share_their_first_half_only():
    one, other = (request_body(200, 0, 0).body(number).decode() for number in (1, 2))
    assert one != other
    same = next(at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
    assert 0.4 < same / len(one) < 0.7


@pytest.mark.parametrize(("events", "is_streamed"), [(0, False), (32, True)])
def test_the_body_has_the_engine_s_instructions(events, is_streamed):
    body = orjson.loads(request_body(200, events, 5, model="m").body(1))
    assert (body["model"], body["stream"], body["seed"]) == ("m", is_streamed, 5)
    assert body["max_tokens"] == max(1, events)
