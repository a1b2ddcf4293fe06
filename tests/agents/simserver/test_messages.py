"""/v1/messages bodies of a simulated engine."""

import json

import pytest

from agents.simserver.messages import count_tokens, read_messages
from agents.simserver.requests import ApiError, RequestParser

PARSER = RequestParser(models=("m",), max_model_len=1000, seed=0)


def body(*roles: object) -> bytes:
    turns = [{"role": role, "content": f"words of {number}"} for number, role in enumerate(roles)]
    return json.dumps({"model": "m", "max_tokens": 4, "messages": turns}).encode()


def test_a_system_turn_among_the_messages_is_taken_where_it_stands():
    """Claude Code sends one as its second message; vLLM takes it since 0.23."""
    turns = [("user", "words of 0"), ("system", "words of 1"), ("assistant", "words of 2")]
    chat = json.dumps(
        {"model": "m", "messages": [{"role": role, "content": text} for role, text in turns]}
    )
    roles = [role for role, _ in turns]
    assert read_messages(PARSER, body(*roles)).prompt == PARSER.chat(chat.encode()).prompt
    assert json.loads(count_tokens(PARSER, body(*roles)).body)["input_tokens"] > 0


def test_a_block_of_billing_is_left_out_of_the_system_prompt():
    """As vLLM does."""
    bill = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332.abc; cch=1;"}
    brief = {"type": "text", "text": "be brief"}

    def prompt(*blocks: dict[str, str]) -> object:
        asked = {**json.loads(body("user")), "system": blocks}
        return read_messages(PARSER, json.dumps(asked).encode()).prompt

    assert prompt(bill, brief) == prompt(brief)


@pytest.mark.parametrize("role", ["ctx", "msg"])
def test_other_names_of_claude_code_are_the_user_s(role):
    assert read_messages(PARSER, body(role)).prompt == read_messages(PARSER, body("user")).prompt


@pytest.mark.parametrize("role", ["king", None, ["user"], {}])
def test_any_other_role_is_refused_by_name(role):
    with pytest.raises(ApiError, match=r"messages\.0\.role"):
        read_messages(PARSER, body(role))
