"""Prefill and decode on different engines: what the replicas of a pair report, and its limits.

Two engines of a pair answer a request in two stages. The prefill replica computes the KV cache of
the prompt, the decode replica receives it from that engine and generates. How the cache gets from
one to the other is the engines' own protocol, the transfer kind:

    nixl     vLLM's NixlConnector. The prefill engine answers with `kv_transfer_params`, which go
             into the decode request: decode follows prefill.
    p2p      vLLM's P2pNcclConnector. Both requests carry the same id, which names both engines'
             addresses: decode follows prefill.
    sglang   SGLang's bootstrap server. Both requests name the prefill engine's server and the same
             room, and are sent at the same time.

Sources: vLLM's toy proxy for the NixlConnector (tests/v1/kv_connector/nixl_integration) and its
example disaggregated_serving_p2p_nccl_xpyd; SGLang's mini load balancer (srt/disaggregation).
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from schemas.ids import ValidModelId

# Of `kv_transfer_params`: 32,768 block ids, which is a prompt of half a million tokens.
PARAMS_BYTES_MAX = 256 * 1024
ADDRESS_PATTERN = r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):[0-9]{1,5}$"
ADDRESS_CHARS_MAX = 128
ROOM_MAX = 2**63 - 1  # SGLang's rooms are 64-bit signed integers
ROOM_PATTERN = r"^[0-9]{1,19}$"


class KvRole(StrEnum):
    """What an engine of a pair does."""

    PREFILL = "prefill"
    DECODE = "decode"


class TransferKind(StrEnum):
    """By which protocol its KV cache goes from one engine to another."""

    NIXL = "nixl"
    P2P = "p2p"
    SGLANG = "sglang"

    @property
    def is_at_once(self) -> bool:
        """Whether both engines get the request at the same time, and not one after the other."""
        return self is TransferKind.SGLANG

    @property
    def decodes_whole(self) -> bool:
        """Whether a decode engine also takes requests that no other engine has computed."""
        return self is TransferKind.NIXL

    def needs_address(self, role: KvRole) -> bool:
        """Whether the other engine of a pair must be told where one with that role is."""
        return self is TransferKind.P2P or (self is TransferKind.SGLANG and role is KvRole.PREFILL)


KINDS = frozenset(TransferKind)

# Open to what later versions add: a router pairs no kind and role that it doesn't know.
_Word = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,16}$")]
KvAddress = Annotated[str, Field(pattern=ADDRESS_PATTERN, max_length=ADDRESS_CHARS_MAX)]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransfer:
    """One replica's part in pairs."""

    kind: _Word
    """The transfer kind: nixl, p2p or sglang; both replicas of a pair have the same."""
    role: _Word
    """prefill or decode."""
    models: tuple[ValidModelId, ...]
    """For requests of which it computes its stage. They are in the heartbeat's `models` only if it
    takes whole requests too, so that a router which knows no stages gives it none."""
    whole: bool = False
    """Whether it takes whole requests too."""
    address: KvAddress | None = None
    """host:port, where the other engine of a pair finds it: of p2p both engines' own, of sglang the
    prefill engine's bootstrap server."""

    @property
    def is_usable(self) -> bool:
        """Whether a router of this version can pair it."""
        if self.kind not in KINDS or self.role not in set(KvRole):
            return False
        needs_address = TransferKind(self.kind).needs_address(KvRole(self.role))
        return self.address is not None or not needs_address
