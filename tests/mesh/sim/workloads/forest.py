"""What tests ask of a workload: its nodes, what they share, and a digest of everything."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from mesh.sim.workload import RequestNode, Segment, Workload
from mesh.sim.workloads.capacity import WorkloadDemand


def nodes_of(root: RequestNode) -> Iterator[RequestNode]:
    """A tree's nodes, parents before children."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(node.children)


def asked(workload: Workload, trees_each: int = 3) -> list[RequestNode]:
    """All nodes of all arrivals, and of each client's first trees."""
    roots = [arrival.node for arrival in workload.arrivals]
    for client in workload.clients:
        roots.extend(islice(client.trees, trees_each))
    return [node for root in roots for node in nodes_of(root)]


def common_tokens(one: tuple[Segment, ...], other: tuple[Segment, ...]) -> int:
    """Tokens of the two prompts' common beginning."""
    tokens = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        tokens += left.tokens
    return tokens


def shared_with_another(nodes: Iterable[RequestNode]) -> float:
    """Preble's measure: the mean share of a prompt that at least one other request begins with."""
    nodes = list(nodes)
    holders: Counter[tuple[Segment, ...]] = Counter()
    for node in nodes:
        holders.update(node.prompt[:end] for end in range(1, len(node.prompt) + 1))
    shares = []
    for node in nodes:
        tokens = 0
        for end, part in enumerate(node.prompt, 1):
            if holders[node.prompt[:end]] < 2:
                break
            tokens += part.tokens
        shares.append(tokens / node.prompt_tokens)
    return sum(shares) / len(shares)


def digest(workload: Workload) -> str:
    """Everything a run would see of the workload, in one word."""
    seen = hashlib.blake2b(digest_size=16)
    for arrival in workload.arrivals:
        seen.update(f"{arrival.at_s!r} {arrival.region}".encode())
    for client in workload.clients:
        seen.update(f"{client.region} {client.starts_at_s!r}".encode())
    for node in asked(workload, trees_each=2):
        row = (*node.prompt, node.answer, node.pause_s, node.session, len(node.children))
        seen.update(repr(row).encode())
    return seen.hexdigest()


def shared_ratio(wanted: WorkloadDemand) -> float:
    """The share of prompt tokens that an endless cache would hit."""
    return 1 - wanted.uncached_tokens / wanted.prompt_tokens
