"""A time profile of one's own, from a TOML file with the fields of `agents.sim.profile.Profile`.

name = "my-gpu"
knots = [[0, 0.012]]       # seconds of an iteration at a number of batched tokens
token_s = 0.0001           # and per token above the last knot
sequence_s = 0.0
context_s = 0.0
arrival_s = 0.0
batch_tokens = 2048
kv_tokens = 120000
max_seqs = 256
model = "my/model"         # the name that it serves; without it, the profile's
"""

import dataclasses
import tomllib
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from agents.sim.profile import Profile
from agents.sim.profiles import PROFILES

_KNOWN = [field.name for field in dataclasses.fields(Profile)]


class ProfileInvalid(ValueError):
    """No such profile, or a file that is not one; the message says what to change."""


def find_profile(name: str) -> Profile:
    """A profile by its name, or from a file whose name ends in .toml. Raises ProfileInvalid."""
    if name in PROFILES:
        return PROFILES[name]
    if not name.endswith(".toml"):
        raise ProfileInvalid(f"no profile {name!r}: use {', '.join(PROFILES)} or a .toml file")
    try:
        given = tomllib.loads(Path(name).read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ProfileInvalid(f"{name}: {error}") from None
    if unknown := sorted(set(given) - set(_KNOWN)):
        raise ProfileInvalid(f"{name}: unknown {', '.join(unknown)}; known: {', '.join(_KNOWN)}")
    try:
        return TypeAdapter(Profile).validate_python(given)
    except ValidationError as error:
        reasons = (
            f"{'.'.join(map(str, reason['loc']))}: {reason['msg']}" for reason in error.errors()
        )
        raise ProfileInvalid(f"{name}: {'; '.join(reasons)}") from None
