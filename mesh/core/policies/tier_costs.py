"""What a held prefix is worth where part of it must first be loaded from a slower tier.

Loading takes a share of the time that computing would: a token of an 8B model has 128 KiB of KV,
which PCIe moves in some 5 us and a local disk in some 30, where a prefill computes it in about 100.
The shares are these in round numbers; nothing here measures a fleet's own.
"""

from mesh.core.model.prompt import Prompt
from mesh.core.policies.mesh_price import HeldPrefix
from mesh.core.prefixes.prefix_index import PrefixIndex

COSTS = (0.0, 0.1, 0.3)  # of computing a token: GPU, CPU, disk


def with_loading(
    held: dict[str, HeldPrefix], index: PrefixIndex[str], prompt: Prompt
) -> dict[str, HeldPrefix]:
    """The same, with fewer tokens where some of them must be loaded."""
    for name in held.keys() & index.slow.keys():
        slow, prefix = index.slow[name], held[name]
        blocks = prompt.hashes[: prefix.blocks]
        cost = sum(COSTS[slow[block]] for block in blocks if block in slow)
        tokens = max(0, prefix.tokens - round(cost * prompt.block_tokens))
        held[name] = prefix._replace(tokens=tokens)
    return held
