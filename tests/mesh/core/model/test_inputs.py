"""The inputs of an embeddings request: how many tokens, and why some are none."""

import pytest

from mesh.core.model.prompt import PIECES_MAX, PromptInvalid, PromptReader
from mesh.core.model.prompt_shapes import text_at
from schemas.http import CHAT, COMPLETIONS, EMBEDDINGS
from schemas.ids import ModelId

MODEL = ModelId("m")


def tokens(given) -> int:
    return PromptReader("k").read(MODEL, text_at(EMBEDDINGS, {"input": given})).tokens


def test_all_inputs_count_together():
    assert tokens("x" * 400) == 100
    assert tokens(["x" * 400, "y" * 200]) == 150
    assert tokens([5, 6, 7]) == 3
    assert tokens([[5, 6, 7], [8]]) == 4


def test_inputs_are_no_prefix_of_others():
    text = "the same beginning " * 200
    read = PromptReader("k").read
    assert read(MODEL, text_at(EMBEDDINGS, {"input": text})).hashes == ()
    assert read(MODEL, text_at(COMPLETIONS, {"prompt": text})).hashes != ()
    asked = {"messages": [{"role": "user", "content": text}]}
    assert read(MODEL, text_at(CHAT, asked)).hashes != ()


def test_texts_teach_tokens_per_byte_and_ids_teach_nothing():
    reader = PromptReader("k")
    text, ids = text_at(EMBEDDINGS, {"input": "x" * 400}), text_at(EMBEDDINGS, {"input": [1] * 9})
    for _ in range(200):
        reader.learn(MODEL, ids.size, 100_000)
    assert reader.read(MODEL, text).tokens == 100
    for _ in range(200):
        reader.learn(MODEL, text.size, 200)
    assert reader.read(MODEL, text).tokens == pytest.approx(200, abs=2)
    assert reader.read(MODEL, ids).tokens == 9


@pytest.mark.parametrize(
    "given", [None, "", [], [""], ["a", 1], [1, "a"], [1, True], [[]], [[1], []], [-1], [1.5], {}]
)
def test_what_is_no_input(given):
    with pytest.raises(PromptInvalid, match="input must be") as refused:
        text_at(EMBEDDINGS, {"input": given})
    assert refused.value.param == "input"


def test_inputs_are_bounded_in_number_and_ids_of_one_are_not():
    for kind in ("a", [1]):
        assert tokens([kind] * PIECES_MAX) > 0
        with pytest.raises(PromptInvalid, match=str(PIECES_MAX)):
            text_at(EMBEDDINGS, {"input": [kind] * (PIECES_MAX + 1)})
    assert tokens([1] * (PIECES_MAX + 1)) == PIECES_MAX + 1
