"""Who asks: the holder of a request's API key, and which residency labels limit the request.

A router looks a key up by its SHA-256, in a table. How long that takes says nothing of the keys
there: whoever could read a part of a hash off it can't choose a key whose hash begins so. Where
keys are not required, an unknown one is nobody's, and such requests are served too.

The request's header, its API key and the region may each name labels. The first that does sets the
range, every other one narrows it, and an empty range is an error and never "anywhere". A label
that no region carries is the client's mistake (400): most likely a word misspelt.

Prompts of a tenant share prefixes only with those of the same tenant: otherwise any client could
request the receipt of a guessed prompt, and read in it whether another had sent it. Requests with
no key, or an unknown one, share prefixes with each other, so their receipts don't say what
matched. Where no keys are listed all requests belong to one tenant.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from math import inf

from pydantic import ValidationError

from infra.tenant_table import Caller, TenantTable, caller_of, caller_with, key_hash
from mesh.adapters.refused import RequestRefused
from mesh.http.tokens import NotSigned, SignerUnknown, TokenRefused, Tokens, is_token
from mesh.http.wrong_keys import WrongKeys
from schemas.http import H_API_KEY, H_AUTHORIZATION, H_RESIDENCY, H_WWW_AUTHENTICATE, Fault
from schemas.ids import UNLISTED_KEY, ModelId, RegionId
from schemas.keys import KeyRecord, Scope
from schemas.limits import KEY, LimitsTable
from schemas.residency import OPEN_GROUND, Ground, Label, Labels, labels_text, narrowed

log = logging.getLogger(__name__)

BEARER = "bearer "
BEARER_CHARS = len(BEARER)
KEY_CHARS_MAX = 16 * 1024  # no header is longer
OWNER_HEX = 32  # of the key's hash
NO_LABEL = (
    f"this region takes no request without a label ({{labels}}): send {H_RESIDENCY}, or use the "
    "base URL with /labels/NAME before /v1, or the key of a tenant with labels. A gateway in "
    "between may leave the header out"
)

ApiKeys = Mapping[str, Caller]  # by the SHA-256 of the key, in hex
NO_HOLDER: tuple[None, float] = (None, inf)
NOBODY = Caller()  # whose key is on no list, or who sent none
HOW = "send an API key as `authorization: Bearer KEY` or `x-api-key: KEY`"
FROM_WHOM = "ask the mesh's operator for"
CHALLENGE = {H_WWW_AUTHENTICATE: "Bearer"}  # RFC 9110, 15.5.2


class Callers:
    """One router's. Tell it by `know` what mesh.toml says, and by `know_made` which keys were made
    on the bus, at the start and whenever it changes."""

    def __init__(
        self,
        home: RegionId,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._home, self._clock, self._wall_clock = home, clock, wall_clock
        self._wrong = WrongKeys()
        self._made: Mapping[str, KeyRecord] | None = None  # by SHA-256; None: not read yet
        self._tokens: Tokens | None = None
        self.must_be_read = False  # the keys on the bus, before the router is ready
        self.know(OPEN_GROUND, {}, {})

    def know(
        self,
        ground: Ground,
        keys: ApiKeys,
        tenants: Mapping[str, TenantTable],
        *,
        is_required: bool = False,
    ) -> None:
        """`keys`: as mesh.toml lists them; `is_required`: nobody is served without one."""
        self._known = ground.labels
        self._confined = ground.confined_to(self._home)
        self._label_required = self._home in ground.label_required
        self._listed, self._tenants, self._is_required = keys, tenants, is_required
        if self._tokens is not None:
            self._tokens.forget()
        self._put_together()

    def take_tokens(
        self, tokens: Tokens | None, find_signers: Callable[[], Awaitable[None]]
    ) -> None:
        """Take these tokens too; None: none. `find_signers` reads the issuer's keys again."""
        self._tokens, self._find_signers = tokens, find_signers
        self._put_together()

    def know_made(self, keys: Iterable[KeyRecord]) -> None:
        """All keys that were made on the bus, with those that are over."""
        self._made = {key.sha256: key for key in keys}
        self._put_together()

    def _put_together(self) -> None:
        """Where mesh.toml lists tenants, a key of another one is not taken: its labels are not
        known. A key that mesh.toml lists is revoked by a record of the bus like any other."""
        made = (self._made or {}).values()
        revoked = {key.sha256 for key in made if key.revoked_at_unix_s is not None}
        listed = {key: (caller, inf) for key, caller in self._listed.items() if key not in revoked}
        self._keys = {
            key.sha256: (caller, key.ends_at_unix_s)
            for key in made
            if key.origin in (None, self._home)
            and (not self._tenants or key.tenant in self._tenants)
            and (caller := _caller_with(key, self._tenants.get(key.tenant))) is not None
        } | listed
        bound = [table for table in self._tenants.values() if table.residency]
        self._has_bound = bool(bound)
        self.must_be_read = self._is_required or not all(table.key_sha256 for table in bound)
        has_any = bool(self._keys or self._made) or self._tokens is not None
        self.are_told_apart = self._is_required or self._has_bound or has_any

    def limits(self) -> dict[str, LimitsTable]:
        """Of all that have any, by the names that they are counted by: tenants and keys."""
        callers = (caller for caller, _ in self._keys.values())
        own = (caller_of(tenant, table, "") for tenant, table in self._tenants.items())
        found = {name: limits for caller in (*callers, *own) for name, limits in caller.limited}
        found.pop(KEY, None)  # nobody's: of a tenant that has tokens alone
        return found

    def own_limits(self) -> frozenset[str]:
        """Names of the keys that were made with limits of their own."""
        made = (self._made or {}).values()
        return frozenset(KEY + key.id for key in made if key.limits)

    def _holder(self, key: str) -> Caller | None:
        caller, ends_at = self._keys.get(key_hash(key), NO_HOLDER) if key else NO_HOLDER
        if caller is None and self._tokens is not None:
            return self._tokens.remembered(key, self._wall_clock())
        return None if ends_at != inf and ends_at <= self._wall_clock() else caller

    def known(self, headers: Mapping[str, str], scope: Scope = Scope.INFERENCE) -> Caller | None:
        """Whose key it has, where that can be said at once; else ask `identified`."""
        key = key_in(headers)
        caller = self._holder(key)
        if self._is_required:
            return caller if caller is not None and scope in caller.scopes else None
        return caller or (None if self._is_somebodys(key) else NOBODY)

    async def identified(
        self, headers: Mapping[str, str], scope: Scope, address: str
    ) -> Caller | None:
        """Who asks from that address; None where callers are not told apart. Raises
        RequestRefused."""
        if not self.are_told_apart:
            return None
        if (caller := self.known(headers, scope)) is not None:
            return caller
        key = key_in(headers)
        if not key:
            raise RequestRefused(Fault.KEY_MISSING, f"{HOW}; {FROM_WHOM} one", headers=CHALLENGE)
        caller = self._holder(key) or await self._looked_at(key, address)
        if self._is_required and scope not in caller.scopes:
            has = ", ".join(sorted(caller.scopes)) or "none"
            message = f"this needs a key with the scope {scope}; the scopes of this one are: {has}"
            refused = RequestRefused(Fault.KEY_FORBIDDEN, message)
            refused.asked_by("", caller.tenant, caller.key_id)
            raise refused
        return caller

    async def _looked_at(self, key: str, address: str) -> Caller:
        """Who has a key that can't be told at once. A token is checked however many wrong keys its
        address has sent: others share that address behind a proxy. Raises RequestRefused."""
        is_over = self._wrong.is_over(address, self._clock())
        try:
            if self._is_token(key):
                return await self._of_token(key)
            refused = self._not_taken(key)
            is_guess = not refused.tenant  # a key that is known is none
        except TokenRefused as error:
            is_guess = isinstance(error, NotSigned)
            message = f"this token is {error}"
            refused = RequestRefused(Fault.KEY_WRONG, message, headers=CHALLENGE)
            refused.detail = f"token {error.logged}"
            if (holder := error.caller) is not None:
                refused.asked_by("", holder.tenant, holder.key_id)
        if is_guess and is_over:
            message = "too many wrong API keys came from this address: check the key"
            detail = refused.detail
            refused = RequestRefused(Fault.KEYS_WRONG, message)
            refused.detail = detail
        elif is_guess and refused.fault is not Fault.KEYS_UNREAD:
            self._wrong.count(address, self._clock())
        if self._is_required or self._is_somebodys(key):
            raise refused
        return NOBODY

    def _is_somebodys(self, key: str) -> bool:
        """Whether it is, was or may be a tenant's: then it is taken or refused, and never nobody's,
        whose prompts may go anywhere."""
        if self._is_token(key):
            return True
        if self._made is None:
            return self._has_bound and bool(key)
        return bool(self._made) and key_hash(key) in self._made

    def _is_token(self, key: str) -> bool:
        return self._tokens is not None and is_token(key)

    async def _of_token(self, key: str) -> Caller:
        """Who has a token that was not looked at of late. Raises TokenRefused, RequestRefused."""
        tokens = self._tokens
        assert tokens is not None
        try:
            caller, until = tokens.check(key, self._wall_clock())
        except SignerUnknown:
            await self._find_signers()
            if not tokens.has_signers:
                message = "this router has not read the keys of the tokens' issuer yet; try again"
                raise RequestRefused(Fault.KEYS_UNREAD, message) from None
            caller, until = tokens.check(key, self._wall_clock())
        caller = self._of_tenant(caller)
        tokens.remember(key, caller, until)
        return caller

    def _of_tenant(self, caller: Caller) -> Caller:
        """The holder of a token, with what mesh.toml says of its tenant. Raises TokenRefused."""
        if self._tenants and caller.tenant not in self._tenants:
            message = f"of the tenant {caller.tenant}, which mesh.toml does not list"
            raise TokenRefused(message, caller=caller)
        own = caller_of(caller.tenant, self._tenants.get(caller.tenant), caller.key_id)
        labels = narrowed(own.residency, caller.residency)
        if labels is not None and not labels:
            raise TokenRefused("for other places than its tenant", caller=caller)
        return own._replace(scopes=caller.scopes, residency=tuple(sorted(labels or ())))

    def _not_taken(self, key: str) -> RequestRefused:
        """Why that key is not taken; whoever has it may know, and operators whose it is."""
        if self._made is None:
            message = "this router has not read all API keys yet; try again, or another region"
            return RequestRefused(Fault.KEYS_UNREAD, message)
        record = self._made.get(key_hash(key))
        fault, headers = Fault.KEY_WRONG, CHALLENGE
        if record is None:
            why = "not known here: check that it is whole"
        elif record.origin not in (None, self._home):
            fault, headers = Fault.KEY_FORBIDDEN, {}
            why = f"for the region {record.origin}; send the request there"
        elif record.ends_at_unix_s <= self._wall_clock():
            why = "revoked" if record.revoked_at_unix_s is not None else "expired"
        elif self._tenants and record.tenant not in self._tenants:
            why = f"of the tenant {record.tenant}, which this router's mesh.toml does not list"
        else:
            why = "one whose limits this router can't read"
        message = f"this API key is {why}" + (f"; {FROM_WHOM} another" if headers else "")
        refused = RequestRefused(fault, message, headers=headers)
        refused.detail = "unknown key"
        if record is not None:
            refused.asked_by("", record.tenant, record.id)
        return refused

    def residency(self, wanted: Labels, caller: Caller | None) -> Labels:
        """The labels, one of which must be carried; empty for anywhere. Raises RequestRefused."""
        unknown = sorted(label for label in wanted if label not in self._known)
        if unknown:
            known = labels_text(self._known) or "none"
            message = f"no region carries {labels_text(unknown)}; labels of this mesh: {known}"
            raise RequestRefused(Fault.INVALID, message, H_RESIDENCY)
        of_key = () if caller is None else caller.residency
        found = narrowed(wanted, of_key, self._confined)
        if found is None and self._label_required:
            message = NO_LABEL.format(labels=labels_text(self._known))
            raise RequestRefused(Fault.RESIDENCY, message, H_RESIDENCY)
        if found is not None and not found:
            raise RequestRefused(Fault.RESIDENCY, self._nothing_left(wanted, of_key), H_RESIDENCY)
        return tuple(sorted(found or ()))

    def _nothing_left(self, wanted: Labels, of_key: Labels) -> str:
        sources: dict[str, frozenset[Label] | Labels] = {
            "the request wants": wanted,
            "its key is for": of_key,
            "this region is confined to": self._confined,
        }
        parts = [f"{who} {labels_text(labels)}" for who, labels in sources.items() if labels]
        return f"{', '.join(parts)}: nothing is left, so it may go nowhere"


def _caller_with(key: KeyRecord, table: TenantTable | None) -> Caller | None:
    """Who has it; None where its limits are none, as it must not be taken without them."""
    try:
        return caller_with(key, table)
    except ValidationError as error:
        log.warning("key %s is not taken: its limits can't be read: %.300s", key.id, error)
        return None


def owner(caller: Caller | None, headers: Mapping[str, str]) -> str:
    """Whose files and batches a request makes and sees: a tenant's, or, where its key is on no
    list, those of holders of that key; empty where callers are not told apart.

    Raises RequestRefused where they are and it has no key: strangers would share a store.
    """
    if caller is None or caller.tenant:
        return "" if caller is None else caller.tenant
    key = key_in(headers)
    if not key:
        message = "send an API key: files and batches belong to its holder"
        raise RequestRefused(Fault.KEY_MISSING, message, H_AUTHORIZATION)
    return f"{UNLISTED_KEY}{key_hash(key)[:OWNER_HEX]}"


def models_for(caller: Caller | None, models: Iterable[ModelId]) -> tuple[ModelId, ...]:
    """Those of these models that the caller may name."""
    some = frozenset() if caller is None else caller.models
    return tuple(model for model in models if not some or model in some)


def check_models(caller: Caller, model: ModelId, adapter: str | None) -> None:
    """Raise RequestRefused for a model, or an adapter beside it, that the key may not name."""
    if not caller.models or {model, adapter or model} <= caller.models:
        return
    named = adapter if model in caller.models else model
    some = ", ".join(sorted(caller.models))
    message = f"this API key may not use the model {named!r:.100}; it may use {some:.500}"
    raise RequestRefused(Fault.KEY_FORBIDDEN, message, "model")


def key_in(headers: Mapping[str, str]) -> str:
    """The API key; empty for none. `authorization` counts before Anthropic's `x-api-key`."""
    authorization = headers.get(H_AUTHORIZATION, "")
    if authorization[:BEARER_CHARS].lower() != BEARER:
        return "" if authorization else headers.get(H_API_KEY, "").strip()[:KEY_CHARS_MAX]
    return authorization[BEARER_CHARS:].strip()[:KEY_CHARS_MAX]
