"""Which tenant a request belongs to, and which residency labels limit it.

The request's header, its API key and the region may each name labels. The first that does sets the
range, every other one narrows it, and an empty range is an error and never "anywhere". A label
that no region carries is the client's mistake (400): most likely a word misspelt. A key that is on
no list sets nothing: keys are not checked here, but by the proxy in front of the routers.

Prompts of a tenant share prefixes only with those of the same tenant: otherwise any client could
request the receipt of a guessed prompt, and read in it whether another had sent it. Requests with
no key, or an unknown one, share prefixes with each other, so their receipts don't say what
matched. Where no keys are listed all requests belong to one tenant.
"""

from collections.abc import Mapping

from infra.tenant_table import KeyHolder, key_hash
from mesh.adapters.refused import RequestRefused
from schemas.http import H_API_KEY, H_AUTHORIZATION, H_RESIDENCY, Fault
from schemas.ids import RegionId
from schemas.residency import Ground, Label, Labels, labels_text, narrowed

BEARER = "bearer "
KEY_CHARS_MAX = 4096
UNLISTED = "key:"  # no tenant's name has a colon
OWNER_HEX = 32  # of the key's hash

ApiKeys = Mapping[str, KeyHolder]  # by the SHA-256 of the key, in hex
NOBODY = KeyHolder("", ())


class Tenants:
    """One router's; `keys` as mesh.toml lists them."""

    def __init__(self, home: RegionId, ground: Ground, keys: ApiKeys) -> None:
        self._known = ground.labels
        self._confined = ground.confined_to(home)
        self._keys = keys

    def residency(self, wanted: Labels, headers: Mapping[str, str]) -> Labels:
        """The labels, one of which must be carried; empty for anywhere. Raises RequestRefused."""
        unknown = sorted(label for label in wanted if label not in self._known)
        if unknown:
            known = labels_text(self._known) or "none"
            message = f"no region carries {labels_text(unknown)}; labels of this mesh: {known}"
            raise RequestRefused(Fault.INVALID, message, H_RESIDENCY)
        of_key = self._holder(headers).residency
        found = narrowed(wanted, of_key, self._confined)
        if found is not None and not found:
            raise RequestRefused(Fault.RESIDENCY, self._nothing_left(wanted, of_key), H_RESIDENCY)
        return tuple(sorted(found or ()))

    def tenant(self, headers: Mapping[str, str]) -> str | None:
        """The tenant whose key it has; empty for no known key, None where no keys are listed."""
        return self._holder(headers).tenant if self._keys else None

    def owner(self, headers: Mapping[str, str]) -> str:
        """Whose files and batches a request makes and sees: a tenant's, or, where its key is on no
        list, those of holders of that key; empty where no keys are listed.

        Raises RequestRefused where keys are listed and it has none: strangers would share a store.
        """
        if not self._keys:
            return ""
        key = _key(headers)
        if not key:
            message = "send an API key: files and batches belong to its holder"
            raise RequestRefused(Fault.KEY_MISSING, message, H_AUTHORIZATION)
        hashed = key_hash(key)
        holder = self._keys.get(hashed)
        return f"{UNLISTED}{hashed[:OWNER_HEX]}" if holder is None else holder.tenant

    def _holder(self, headers: Mapping[str, str]) -> KeyHolder:
        key = _key(headers) if self._keys else ""
        return self._keys.get(key_hash(key), NOBODY) if key else NOBODY

    def _nothing_left(self, wanted: Labels, of_key: Labels) -> str:
        sources: dict[str, frozenset[Label] | Labels] = {
            "the request wants": wanted,
            "its key is for": of_key,
            "this region is confined to": self._confined,
        }
        parts = [f"{who} {labels_text(labels)}" for who, labels in sources.items() if labels]
        return f"{', '.join(parts)}: nothing is left, so it may go nowhere"


def _key(headers: Mapping[str, str]) -> str:
    """The API key; empty for none. `authorization` counts before Anthropic's `x-api-key`."""
    authorization = headers.get(H_AUTHORIZATION, "")
    if authorization[: len(BEARER)].lower() != BEARER:
        return "" if authorization else headers.get(H_API_KEY, "").strip()[:KEY_CHARS_MAX]
    return authorization[len(BEARER) :].strip()[:KEY_CHARS_MAX]
