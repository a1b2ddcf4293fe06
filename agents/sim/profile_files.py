"""Profiles of simulated engines by name, or from a file: measured (.json) or written (.toml)."""

import dataclasses
import tomllib
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from agents.core.engine_curves import FILE_BYTES_MAX, CurvesInvalid, decode_calibrated
from agents.sim.measured_profile import measured_profile
from agents.sim.profiles import PROFILES, Profile
from schemas.problems import problem_lines

MEASURED, WRITTEN = ".json", ".toml"
_KNOWN = [field.name for field in dataclasses.fields(Profile)]


class ProfileInvalid(ValueError):
    """No such profile, or a file that is not one; the message says what to change."""


def find_profile(name: str) -> Profile:
    """A profile by its name, or a file's: of `mesh-agent profile` if its name ends in .json, else
    in .toml. Raises ProfileInvalid."""
    if name in PROFILES:
        return PROFILES[name]
    if name.endswith(MEASURED):
        return _measured(Path(name))
    if name.endswith(WRITTEN):
        return _written(name)
    known = ", ".join(PROFILES)
    raise ProfileInvalid(
        f"unknown profile {name!r}: use one of {known}, or a {MEASURED} or {WRITTEN} file"
    )


def _measured(file: Path) -> Profile:
    try:
        with file.open("rb") as opened:
            data = opened.read(FILE_BYTES_MAX + 1)
        return measured_profile(decode_calibrated(data), file.stem)
    except OSError as error:
        raise ProfileInvalid(f"{file} can't be read: {error.strerror}") from None
    except CurvesInvalid as error:
        raise ProfileInvalid(
            f"{file}: {error} (`mesh-agent profile --calibrate --out FILE` writes such a file)"
        ) from None


def _written(name: str) -> Profile:
    try:
        given = tomllib.loads(Path(name).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ProfileInvalid(f"{name}: {error}") from None
    if unknown := sorted(set(given) - set(_KNOWN)):
        raise ProfileInvalid(f"{name}: unknown {', '.join(unknown)}; known: {', '.join(_KNOWN)}")
    try:
        return TypeAdapter(Profile).validate_python(given)
    except ValidationError as error:
        lines = problem_lines(error, lambda _: _KNOWN)
        raise ProfileInvalid(f"{name}: {'; '.join(lines)}") from None
