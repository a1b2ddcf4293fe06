"""A cut request begins as the whole one did, and asks for one token more."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.adapters.kept_prefixes import BODY_BYTES_MAX, KeptPrefixes, cut_body
from mesh.core.model.prompt import prompt_text
from mesh.session.record import OpenRequest
from schemas.http import CHAT, COMPLETIONS
from tests.mesh.core.build import request

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
PARTS = st.lists(
    TEXTS.map(lambda text: {"type": "text", "text": text})
    | st.just({"type": "image_url", "image_url": {"url": "data:,x"}}),
    max_size=4,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(("system", "user", "assistant")), "content": TEXTS | PARTS},
        optional={"tool_calls": st.lists(TEXTS, max_size=2)},
    ),
    min_size=1,
    max_size=4,
)
TOOLS = st.just({}) | st.just({"tools": [{"type": "function", "function": {"name": "f"}}]})


def cut(fields, text_bytes, path=CHAT):
    found = cut_body(orjson.dumps(fields), path, text_bytes)
    return None if found is None else orjson.loads(found)


@given(MESSAGES, TOOLS, st.integers(1, 200) | st.integers(200, 6000))
def test_a_cut_chat_has_the_beginning_of_its_text(messages, tools, text_bytes):
    found = cut({"messages": messages} | tools, text_bytes)
    if found is None:
        return
    whole = prompt_text({"messages": messages} | tools, chat=True).data
    kept = prompt_text(found, chat=True).data
    assert whole.startswith(kept) and len(kept) <= text_bytes


@given(TEXTS, st.integers(1, 60))
def test_a_cut_text_is_the_beginning_of_it_but_for_half_a_character(text, text_bytes):
    found = cut({"prompt": text}, text_bytes, COMPLETIONS)
    kept = "" if found is None else found["prompt"]
    assert text.startswith(kept)
    assert min(text_bytes, len(text.encode())) - 3 <= len(kept.encode()) <= text_bytes


def test_what_shapes_the_prompt_stays_and_what_shapes_the_answer_goes():
    asked = {
        "model": "m",
        "messages": [{"role": "system", "content": "S" * 600}, {"role": "user", "content": "why?"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "cache_salt": "acme",
        "chat_template_kwargs": {"think": False},
        "user": "ada",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 900,
        "max_completion_tokens": 900,
        "n": 4,
        "response_format": {"type": "json_object"},
    }
    found = cut(asked, 512)
    before = len(b"\0tools\0" + orjson.dumps(asked["tools"]) + b"\0system\0")
    assert found == {
        "model": "m",
        "messages": [{"role": "system", "content": "S" * (512 - before)}],
        "tools": asked["tools"],
        "cache_salt": "acme",
        "chat_template_kwargs": {"think": False},
        "stream": False,
        "max_tokens": 1,
    }


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"prompt": [1, 2, 3]}, COMPLETIONS),
        ({"prompt": ["a", "b"]}, COMPLETIONS),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, CHAT),
        ({"messages": [{"role": "averylongrole", "content": "x"}]}, CHAT),
    ],
)
def test_what_has_no_text_to_cut_is_not_kept(fields, path):
    assert cut(fields, 10, path) is None


def test_what_is_nested_too_deep_to_be_written_again_is_not_kept():
    deep = b"[" * 300 + b"]" * 300
    body = b'{"prompt": "' + b"p" * 1000 + b'", "unknown": ' + deep + b"}"
    assert cut_body(body, COMPLETIONS, 512) is None


def test_what_is_kept_is_there_until_it_is_dropped_and_never_too_large():
    kept = KeptPrefixes()

    def keep(prefix: int, body: bytes) -> int | None:
        return kept.keep(prefix, OpenRequest(request=request(1), path=COMPLETIONS, body=body), 2)

    size = keep(7, orjson.dumps({"prompt": "p" * 1000}))
    warm_up = kept.open_warm_up(request(2), 7)
    assert (size, warm_up.path) == (len(warm_up.body), COMPLETIONS)
    kept.drop(7)
    with pytest.raises(KeyError):
        kept.open_warm_up(request(3), 7)
    assert keep(8, b"") is None, "its body has gone"
    large = orjson.dumps({"prompt": "p" * 1000, "tools": "t" * BODY_BYTES_MAX})
    assert keep(9, large) is None
