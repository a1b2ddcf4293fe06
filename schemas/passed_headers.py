"""Which headers of an engine's answer reach the client, in which bounds.

Engines and what runs before them send harmless things in headers: times, limits, names of theirs.
Only names that are listed, or begin with a prefix that is, pass: any other may be an order to a
proxy on the way (`connection`, `set-cookie`, and of `x-` those by which nginx, Envoy, LiteSpeed and
others let a server steer them), and no list of those is complete. Ours (`x-mesh-`, `x-request-id`)
are not listed either. The agent chooses, and the router checks by the same rule what it was sent.
"""

import re
from collections.abc import Iterable, Mapping

ALLOWED = frozenset(
    {
        "retry-after",
        "server-timing",
        # of Text Generation Inference
        "x-compute-characters",
        "x-compute-time",
        "x-compute-type",
        "x-generated-tokens",
        "x-prompt-tokens",
        "x-queue-time",
        "x-time-per-token",
        "x-total-time",
        "x-validation-time",
    }
)
ALLOWED_PREFIXES = (
    "openai-",
    "x-inference-",
    "x-llama-",
    "x-ratelimit-",
    "x-sglang-",
    "x-vllm-",
)
HEADERS_MAX = 16
NAME_CHARS_MAX = 64
BYTES_MAX = 2048  # of all names and values
_may_be_name = re.compile(r"[a-z0-9-]+").fullmatch
_may_be_value = re.compile(r"[ -~]*").fullmatch

Pairs = Iterable[tuple[str, str]]


def may_pass(name: str) -> bool:
    """Whether a header of that name, in lower case, is for the client."""
    is_listed = name in ALLOWED or name.startswith(ALLOWED_PREFIXES)
    return is_listed and len(name) <= NAME_CHARS_MAX


def chosen(headers: Pairs) -> tuple[str, ...]:
    """Those that pass: name, value, name, value. What is beyond the bounds is left out."""
    found: dict[str, str] = {}
    size = 0
    for name, value in headers:
        if not (may_pass(name) and _may_be_name(name) and _may_be_value(value)):
            continue
        size += len(name) + len(value) + 2
        if size > BYTES_MAX or (name not in found and len(found) == HEADERS_MAX):
            break
        # RFC 9110, 5.3: lines of one name are one list.
        found[name] = f"{found[name]}, {value}" if name in found else value
    return tuple(text for pair in found.items() for text in pair)


def as_mapping(sent: tuple[str, ...]) -> Mapping[str, str]:
    """The headers that an agent sent, as far as they may pass."""
    if not sent:
        return {}
    checked = chosen(zip(sent[::2], sent[1::2], strict=False))
    return dict(zip(checked[::2], checked[1::2], strict=True))
