"""mesh.toml's `[auth]`: whether routers serve holders of API keys alone."""

from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from typing import Annotated, Literal, Protocol
from urllib.parse import urlsplit

from pydantic import Field, StrictBool, field_validator

from infra.address import Address
from schemas.ids import RegionId
from schemas.settings import Option, Table

OPEN = "whoever reaches it is served, with a key or without: set required = true in [auth]"


# With a public key alone: by none, and by a secret (HS…), whoever knows the keys could sign.
Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]
Word = Annotated[str, Field(min_length=1, max_length=1024)]
Claim = Annotated[str, Field(min_length=1, max_length=200)]


class JwtTable(Table):
    """`[auth.jwt]`: tokens of an identity provider (OpenID Connect) in place of API keys."""

    issuer: Annotated[Word, Option("Who signs: the claim `iss` of a token.")]
    audience: Annotated[Word, Option("For whom a token must be: its claim `aud`.")]
    jwks: Annotated[
        Word,
        Option("The issuer's keys, a JWK Set: an https URL, or the whole path of a file."),
    ]
    algorithms: Annotated[
        Annotated[tuple[Algorithm, ...], Field(min_length=1)],
        Option("By which a token may be signed."),
    ] = ("RS256",)
    tenant_claim: Annotated[Claim, Option("Which claim names the tenant.")] = "tenant"
    scope_claim: Annotated[
        Claim, Option("Which claim lists scopes; those of other services are passed over.")
    ] = "scope"
    residency_claim: Annotated[
        Claim | None, Option("Which claim lists labels of places for its prompts.", default="none")
    ] = None
    leeway_s: Annotated[
        Annotated[float, Field(strict=True, ge=0, le=300)],
        Option("By which clocks of issuer and routers may differ."),
    ] = 30.0

    @field_validator("jwks")
    @classmethod
    def _encrypted(cls, jwks: str) -> str:
        host = urlsplit(jwks).hostname or ""
        if jwks.startswith("http://") and not _is_loopback(host):
            raise ValueError("write an https URL: whoever changes the keys on the way signs tokens")
        if not jwks.startswith(("https://", "http://", "/")):
            raise ValueError("write an https URL, or a file's whole path, like /etc/mesh/jwks.json")
        return jwks


class AuthTable(Table):
    """`[auth]`: who may use the routers' HTTP endpoints."""

    required: Annotated[
        StrictBool, Option("Whether requests need an API key; else a key only says whose one is.")
    ] = False
    jwt: Annotated[JwtTable | None, Option("`[auth.jwt]`, below.", default="none")] = None


class HasHttp(Protocol):
    """A region's table."""

    @property
    def http(self) -> Address:
        """Where clients reach its routers."""


def open_regions(
    auth: AuthTable, regions: Mapping[RegionId, HasHttp]
) -> Iterator[tuple[RegionId, Address]]:
    """Regions that serve everybody, and that others than this machine's processes reach."""
    for name, region in regions.items():
        if not auth.required and not _is_loopback(region.http.host):
            yield name, region.http


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name: its process listens everywhere
        return False
