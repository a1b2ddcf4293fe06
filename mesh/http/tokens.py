"""Tokens of an identity provider (JWT, RFC 7519) in place of API keys.

Which algorithms count is the operator's choice among those with a public key (`JwtTable`), never
the token's; its signature, issuer, audience and times are checked by PyJWT. A token that was
checked is remembered for a while, so requests of one session cost one check.
"""

from collections import OrderedDict
from typing import Any

import jwt

from infra.auth_table import JwtTable
from infra.tenant_table import Caller, key_hash
from schemas.ids import NameInvalid, checked_name
from schemas.keys import Scope
from schemas.residency import LABELS_MAX, Label, Labels

REMEMBERED_MAX = 10_000
REMEMBERED_S = 300.0  # then it is checked again: a signing key may have been withdrawn
KEYS_MAX = 64  # of an issuer's set
ID_HEX = 12
CLAIMS_WRONG = (  # found once the signature has been found right
    jwt.exceptions.ExpiredSignatureError,
    jwt.exceptions.ImmatureSignatureError,
    jwt.exceptions.InvalidAudienceError,
    jwt.exceptions.InvalidIssuedAtError,
    jwt.exceptions.InvalidIssuerError,
    jwt.exceptions.InvalidJTIError,
    jwt.exceptions.InvalidSubjectError,
    jwt.exceptions.MissingRequiredClaimError,
)


class TokenRefused(Exception):
    """The token is not taken; the message says why, to whoever sent it.

    `logged`: the same for operators, with nothing that is not verified. `caller`: its holder, where
    the token itself is valid.
    """

    def __init__(self, message: str, logged: str = "", caller: Caller | None = None) -> None:
        super().__init__(message)
        self.logged, self.caller = logged or message, caller


class NotSigned(TokenRefused):
    """Nothing shows that its issuer has signed it: it may be a guess."""


class SignerUnknown(NotSigned):
    """No key that is known here has signed it: the issuer may have a new one."""


def is_token(key: str) -> bool:
    """Whether it has the form of a signed token, which no API key of the mesh has."""
    return key.startswith("eyJ") and key.count(".") == 2


class Tokens:
    """The tokens of one issuer, by its keys; times are Unix seconds."""

    def __init__(self, table: JwtTable) -> None:
        self.table = table
        self._signers: dict[str | None, jwt.PyJWK] | None = None
        self._key_set: bytes | None = None  # that they were read from
        self._seen: OrderedDict[str, tuple[Caller, float]] = OrderedDict()

    @property
    def has_signers(self) -> bool:
        return self._signers is not None

    def know(self, key_set: bytes | None) -> None:
        """Check tokens by these keys (a JWK Set, RFC 7517) from now on; None: by none any more.
        Raises ValueError."""
        if key_set == self._key_set:
            return
        if key_set is None:
            self._signers = self._key_set = None
            self._seen.clear()
            return
        try:
            keys = jwt.PyJWKSet.from_json(key_set.decode()).keys
        except (jwt.PyJWTError, ValueError, AttributeError, TypeError, KeyError) as error:
            raise ValueError(f"no set of keys: {error or type(error).__name__}"[:300]) from error
        self._signers = {key.key_id: key for key in keys[:KEYS_MAX]}
        self._key_set = key_set
        self._seen.clear()

    def remembered(self, token: str, now: float) -> Caller | None:
        """Who has a token that was checked of late."""
        caller, until = self._seen.get(key_hash(token), (None, 0.0))
        return caller if until > now else None

    def remember(self, token: str, caller: Caller, until: float) -> None:
        """That is who has it, until then."""
        while len(self._seen) >= REMEMBERED_MAX:
            self._seen.popitem(last=False)
        self._seen[key_hash(token)] = caller, until

    def forget(self) -> None:
        """What was said of tokens may not hold any more."""
        self._seen.clear()

    def check(self, token: str, now: float) -> tuple[Caller, float]:
        """Who has that token, and until when that may be remembered. Raises TokenRefused."""
        table = self.table
        try:
            header = jwt.get_unverified_header(token)
            signer = (self._signers or {}).get(header.get("kid"))
            if signer is None:
                raise SignerUnknown("signed with a key that its issuer does not list")
            claims = jwt.decode(
                token,
                signer,
                algorithms=list(table.algorithms),
                audience=table.audience,
                issuer=table.issuer,
                leeway=table.leeway_s,
                options={"require": ["exp", "iss", "aud"]},
            )
        except (jwt.PyJWTError, ValueError, TypeError) as error:
            kind = type(error).__name__
            message = f"not valid: {error or kind}"[:200]
            refused = TokenRefused if isinstance(error, CLAIMS_WRONG) else NotSigned
            raise refused(message, f"not valid: {kind}") from error
        until = min(now + REMEMBERED_S, float(claims["exp"]) + table.leeway_s)
        return self._caller(claims), until

    def _caller(self, claims: dict[str, Any]) -> Caller:
        table = self.table
        try:
            tenant = checked_name("tenant", str(claims.get(table.tenant_claim, "")))
        except NameInvalid as error:
            raise TokenRefused(f"without a tenant in its claim {table.tenant_claim}") from error
        known = {scope.value for scope in Scope}
        scopes = frozenset(Scope(one) for one in _words(claims, table.scope_claim) if one in known)
        labels: Labels = ()
        if table.residency_claim is not None and table.residency_claim in claims:
            labels = tuple(Label(one) for one in sorted(_words(claims, table.residency_claim)))
            if not 0 < len(labels) <= LABELS_MAX or not all(map(_is_label, labels)):
                raise TokenRefused(f"with no labels in its claim {table.residency_claim}")
        subject = f"{table.issuer} {claims.get('sub', '')}"
        key_id = f"jwt-{key_hash(subject)[:ID_HEX]}"
        return Caller(key_id, tenant, scopes, residency=labels)


def _words(claims: dict[str, Any], name: str) -> set[str]:
    """A claim's values: a list of texts, or one text with spaces between (RFC 8693, 4.2)."""
    given = claims.get(name, ())
    if isinstance(given, str):
        return set(given.split())
    return {one for one in given if isinstance(one, str)} if isinstance(given, list) else set()


def _is_label(text: str) -> bool:
    try:
        return bool(checked_name("label", text))
    except NameInvalid:
        return False
