"""Tokens: what is taken, by whom it is, and what forgers try."""

import base64
import contextlib
import datetime
import hmac
import json
from hashlib import sha256

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from infra.auth_table import JwtTable
from infra.tenant_table import TenantTable
from mesh.adapters.refused import RequestRefused
from mesh.http.callers import NOBODY, Callers, key_in
from mesh.http.tokens import SignerUnknown, TokenRefused, Tokens, is_token
from schemas.http import Fault
from schemas.keys import Scope
from schemas.residency import OPEN_GROUND

NOW = 1_800_000_000.0
RSA, OTHER = (rsa.generate_private_key(public_exponent=65537, key_size=2048) for _ in range(2))
EC = ec.generate_private_key(ec.SECP256R1())
TABLE = JwtTable(issuer="https://id", audience="mesh", jwks="/x", algorithms=("RS256", "ES256"))


def public(key, kid: str) -> dict:
    kind = jwt.algorithms.RSAAlgorithm if key is not EC else jwt.algorithms.ECAlgorithm
    return json.loads(kind.to_jwk(key.public_key())) | {"kid": kid}


SET = json.dumps({"keys": [public(RSA, "r"), public(EC, "e")]}).encode()


@pytest.fixture(autouse=True)
def fixed_time(monkeypatch):
    """PyJWT reads the clock by itself."""

    class Fixed(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromtimestamp(NOW, tz)

    monkeypatch.setattr("jwt.api_jwt.datetime", Fixed)


def tokens(table=TABLE) -> Tokens:
    made = Tokens(table)
    made.know(SET)
    return made


CLAIMS = {
    "iss": "https://id",
    "aud": "mesh",
    "exp": NOW + 600,
    "sub": "someone",
    "tenant": "acme",
    "scope": "openid inference",
}


def token(key=RSA, kid="r", algorithm="RS256", **claims) -> str:
    kept = {name: one for name, one in (CLAIMS | claims).items() if one is not None}
    return jwt.encode(kept, key, algorithm, headers={"kid": kid} if kid else {})


@pytest.mark.parametrize("signed", [{}, {"key": EC, "kid": "e", "algorithm": "ES256"}])
def test_a_token_says_whose_a_request_is(signed):
    caller, until = tokens().check(token(**signed), NOW)
    assert (caller.tenant, caller.scopes) == ("acme", {Scope.INFERENCE})
    assert caller.key_id.startswith("jwt-") and until == NOW + 300
    again, _ = tokens().check(token(iat=NOW - 5, exp=NOW + 60, **signed), NOW)
    assert again.key_id == caller.key_id, "of one subject"


def test_claims_have_the_names_that_the_operator_gives():
    table = TABLE.model_copy(
        update={"tenant_claim": "org", "scope_claim": "may", "residency_claim": "where"}
    )
    given = token(tenant=None, org="beta", may=["batch", "other"], where=["eu"])
    caller, _ = tokens(table).check(given, NOW)
    assert (caller.tenant, caller.scopes, caller.residency) == ("beta", {Scope.BATCH}, ("eu",))
    with pytest.raises(TokenRefused, match="no labels"):
        tokens(table).check(token(org="beta", where=[]), NOW)


def unsigned(header: dict, claims: dict = CLAIMS, signature: bytes = b"") -> str:
    parts = [json.dumps(part).encode() for part in (header, claims)]
    return b".".join(
        base64.urlsafe_b64encode(part).rstrip(b"=") for part in (*parts, signature)
    ).decode()


def hmac_with_the_public_key() -> str:
    pem = RSA.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    signed = unsigned({"alg": "HS256", "kid": "r"}).removesuffix(".")
    digest = hmac.digest(pem, signed.encode(), sha256)
    return f"{signed}.{base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"


@pytest.mark.parametrize("given", [
    token(exp=NOW - 31), token(exp=None), token(exp="soon"),
    token(nbf=NOW + 31), token(iss="https://other"), token(iss=None),
    token(aud="other"), token(aud=None), token(tenant=None), token(tenant="A b"),
    token(tenant=["acme"]), token(OTHER, "r"), token(OTHER, "x"), token(kid=None),
    token(RSA, "e"), token(algorithm="RS384"),
    unsigned({"alg": "none", "kid": "r"}), unsigned({"alg": "NONE", "kid": "r"}),
    unsigned({"alg": ["RS256"], "kid": "r"}), unsigned({"alg": "RS256", "kid": {"r": 1}}),
    unsigned({"alg": "RS256", "kid": "r", "jwk": public(OTHER, "r")}),
    hmac_with_the_public_key(), "eyJ..", "eyJ.e30.x", token() + "x",
])  # fmt: skip
def test_what_is_not_signed_for_this_mesh_is_refused(given):
    with pytest.raises(TokenRefused):
        tokens().check(given, NOW)


def test_clocks_may_differ_by_the_leeway():
    assert tokens().check(token(exp=NOW - 20), NOW)[0].tenant == "acme"


@pytest.mark.parametrize("algorithms", [("none",), ("HS256",), ("RS256", "HS512"), ()])
def test_no_operator_may_choose_what_anybody_can_sign(algorithms):
    with pytest.raises(ValueError):
        JwtTable(issuer="i", audience="a", jwks="/x", algorithms=algorithms)
    with pytest.raises(ValueError, match="https"):
        JwtTable(issuer="i", audience="a", jwks="http://id.example/keys")
    with pytest.raises(ValueError, match="whole path"):
        JwtTable(issuer="i", audience="a", jwks="jwks.json")


@pytest.mark.parametrize(
    "given", [b"", b"{", b"[]", b"{}", b'{"keys": 1}', b'{"keys": [{}]}', b"\xff"]
)
def test_what_is_no_set_of_keys_changes_nothing(given):
    some = tokens()
    with pytest.raises(ValueError, match="no set of keys"):
        some.know(given)
    assert some.check(token(), NOW)


@given(st.text(max_size=300), st.text(max_size=50))
def test_whatever_a_header_holds_is_a_key_or_none(text, other):
    for headers in ({"authorization": text, "x-api-key": other}, {"x-api-key": text}):
        key = key_in(headers)
        assert key == key.strip() and len(key) <= 300
        if is_token("eyJ" + text):
            with pytest.raises(TokenRefused):
                tokens().check("eyJ" + text, NOW)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def callers(**known) -> tuple[Callers, Tokens, list[int]]:
    found: list[int] = []
    made, some = Callers("us", lambda: NOW, lambda: NOW), Tokens(TABLE)

    async def find_signers():
        found.append(1)
        if len(found) == known.get("found_at", 1):
            some.know(SET)

    made.know(OPEN_GROUND, {}, {}, is_required=known.get("is_required", True))
    made.take_tokens(some, find_signers)
    made.know_made(())
    return made, some, found


async def test_a_new_signer_is_looked_for_once_and_a_token_checked_once(monkeypatch):
    some, checked, found = callers()
    headers = bearer(token())
    assert some.known(headers) is None
    caller = await some.identified(headers, Scope.INFERENCE, "192.0.2.1")
    assert caller.tenant == "acme" and found == [1]
    monkeypatch.setattr(checked, "check", None)  # it is not called again
    assert some.known(headers) == caller
    some.know(OPEN_GROUND, {}, {}, is_required=True)
    assert some.known(headers) is None, "mesh.toml may say otherwise now"


async def test_scopes_of_tokens_hold_and_wrong_ones_are_counted():
    some, _, _ = callers()
    with pytest.raises(RequestRefused, match="the scope batch") as scope:
        await some.identified(bearer(token()), Scope.BATCH, "192.0.2.1")
    assert scope.value.fault is Fault.KEY_FORBIDDEN
    faults = []
    for _ in range(25):
        with pytest.raises(RequestRefused) as caught:
            await some.identified(bearer(token(OTHER)), Scope.INFERENCE, "192.0.2.1")
        faults.append(caught.value.fault)
    assert faults == [Fault.KEY_WRONG] * 20 + [Fault.KEYS_WRONG] * 5
    assert (await some.identified(bearer(token()), Scope.INFERENCE, "192.0.2.1")).tenant == "acme"


@pytest.mark.parametrize("claims", [
    {"exp": NOW - 31}, {"exp": None}, {"nbf": NOW + 31}, {"iat": NOW + 31}, {"iat": "now"},
    {"aud": "other"}, {"iss": "https://other"}, {"sub": 1}, {"jti": 1}, {"tenant": None},
])  # fmt: skip
@pytest.mark.parametrize("is_required", [True, False])
async def test_what_the_issuer_signed_is_no_guess_whatever_it_claims(claims, is_required):
    """A client whose token is over tries it again; others at its address must not pay for that."""
    some, _, _ = callers(is_required=is_required)
    for _ in range(25):
        with pytest.raises(RequestRefused, match="this token is") as caught:
            await some.identified(bearer(token(**claims)), Scope.INFERENCE, "192.0.2.1")
        assert caught.value.fault is Fault.KEY_WRONG
    with pytest.raises(RequestRefused) as caught:
        await some.identified(bearer(token(OTHER)), Scope.INFERENCE, "192.0.2.1")
    assert caught.value.fault is Fault.KEY_WRONG
    for _ in range(25):
        with contextlib.suppress(RequestRefused):
            await some.identified(bearer(token(OTHER, **claims)), Scope.INFERENCE, "192.0.2.1")
    with pytest.raises(RequestRefused) as caught:
        await some.identified(bearer(token(OTHER, **claims)), Scope.INFERENCE, "192.0.2.1")
    assert caught.value.fault is Fault.KEYS_WRONG
    with pytest.raises(RequestRefused) as caught:
        await some.identified(bearer(token(**claims)), Scope.INFERENCE, "192.0.2.1")
    assert caught.value.fault is Fault.KEY_WRONG, "its own answer, whoever guesses beside it"


async def test_without_the_issuers_keys_no_token_is_taken_and_none_is_called_wrong():
    some, _, _ = callers(found_at=99)
    for _ in range(30):
        with pytest.raises(RequestRefused) as caught:
            await some.identified(bearer(token()), Scope.INFERENCE, "192.0.2.1")
        assert caught.value.fault is Fault.KEYS_UNREAD


async def test_a_wrong_token_is_refused_also_where_none_is_required():
    """As nobody's its prompt could go anywhere, whatever labels its tenant has."""
    some, _, _ = callers(is_required=False)
    with pytest.raises(RequestRefused) as caught:
        await some.identified(bearer(token(OTHER)), Scope.INFERENCE, "192.0.2.1")
    assert caught.value.fault is Fault.KEY_WRONG
    assert (await some.identified(bearer(token()), Scope.INFERENCE, "a")).tenant == "acme"
    assert some.known({}) == NOBODY
    assert some.known(bearer("unused")) == NOBODY


@pytest.mark.parametrize(
    ("given", "logged", "tenant"),
    [
        (token(exp=NOW - 31), "token not valid: ExpiredSignatureError", ""),
        (token(OTHER, "x"), "token signed with a key that its issuer does not list", ""),
        (unsigned({"alg": "typed", "kid": "r"}), "token not valid: InvalidAlgorithmError", ""),
        (token(tenant="beta"), "of the tenant beta, which mesh.toml does not list", "beta"),
    ],
)
async def test_operators_are_told_why_a_token_is_refused_by_what_was_verified(
    given, logged, tenant
):
    some, _, _ = callers()
    some.know(OPEN_GROUND, {}, {"acme": TenantTable()}, is_required=True)
    with pytest.raises(RequestRefused) as caught:
        await some.identified(bearer(given), Scope.INFERENCE, "192.0.2.1")
    assert logged in caught.value.detail and caught.value.tenant == tenant
    assert caught.value.detail.startswith("key jwt-" if tenant else "token ")


@pytest.mark.parametrize("is_required", [True, False])
async def test_wrong_keys_of_others_at_its_address_lock_no_token_out(is_required):
    """Behind a proxy all clients have one address."""
    some, _, _ = callers(is_required=is_required)
    for wrong in ("guess", token(OTHER)):
        for _ in range(25):
            with contextlib.suppress(RequestRefused):
                await some.identified(bearer(wrong), Scope.INFERENCE, "192.0.2.1")
    caller = await some.identified(bearer(token()), Scope.INFERENCE, "192.0.2.1")
    assert caller.tenant == "acme"


def test_the_same_set_read_again_forgets_no_token():
    some = tokens()
    caller, until = some.check(token(), NOW)
    some.remember(token(), caller, until)
    some.know(SET)
    assert some.remembered(token(), NOW) == caller
    some.know(json.dumps({"keys": [public(EC, "e")]}).encode())
    assert some.remembered(token(), NOW) is None
    some.know(SET)
    some.know(None)
    with pytest.raises(SignerUnknown):
        some.check(token(), NOW)
    some.know(SET)
    assert some.check(token(), NOW)


def test_a_key_of_no_known_signer_is_told_from_a_wrong_one():
    with pytest.raises(SignerUnknown):
        tokens().check(token(kid="new"), NOW)
