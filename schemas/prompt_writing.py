"""How engines write the prompt of a `/v1/messages` request, by their kind: for routers and agents.

Claude Code's system prompt begins with a block that names its billing, with a version and a hash
that differ between conversations or requests; and it sends system turns among the messages. What
becomes of both decides what an engine finds in its prefix cache (docs/engines.md has the table by
versions; `tests/engines` hold it to real engines). Whether system turns are moved is a property of
the model's template too: agents find it out and heartbeats say it (`Heartbeat.system_first`).

Sources: vLLM's `entrypoints/anthropic/serving.py` and pull requests 36829 and 44283, llama.cpp's
pull request 21793, SGLang's `entrypoints/anthropic`, Ollama's `anthropic/anthropic.go`.
"""

from collections.abc import Iterable, Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

BILLING_HEADER = "x-anthropic-billing-header"


class Billing(IntEnum):
    """What becomes of a billing block; the more of it is kept, the fewer prompts are alike."""

    LEFT_OUT = 0
    MASKED = 1
    KEPT = 2


class PromptWriting(NamedTuple):
    """How an engine writes such prompts. `system_first`: system turns among the messages go to the
    end of the system prompt; None where engines of a model differ in that."""

    billing: Billing = Billing.LEFT_OUT
    system_first: bool | None = False


BILLING: Mapping[str, Billing] = MappingProxyType(
    {
        "vllm": Billing.LEFT_OUT,
        "sglang": Billing.KEPT,
        "llamacpp": Billing.MASKED,
        "openai": Billing.KEPT,
    }
)


def common_writing(engines: Iterable[tuple[str, bool]]) -> PromptWriting:
    """How prompts of a model are taken to be written, by the kind of each of its engines and
    whether that one moves system turns. Where they differ, so that none is taken to hold what it
    does not: two prompts that are alike so are alike in each of them."""
    different = set(engines)
    if not different:
        return PromptWriting()
    billing = max(BILLING.get(kind, Billing.KEPT) for kind, _ in different)
    moves = {moves for _, moves in different}
    return PromptWriting(billing, moves.pop() if len(moves) == 1 else None)
