"""How people write lists and pairs in one word: `a,b` and `us=4,eu=2`.

These run before a field's own validation, so a value that is not text is left as it is.
"""

from collections.abc import Iterable


def listed(value: object) -> object:
    """`a,b` as a list. Raises ValueError for an empty part or one that is there twice."""
    if not isinstance(value, str):
        return value
    parts = [part.strip() for part in value.split(",")]
    if not all(parts):
        raise ValueError(f"{value!r} has an empty part: write A or A,B")
    return unique(parts)


def paired(value: object) -> object:
    """`us=4,eu=2` as a dict. Raises ValueError for what is no pair or is there twice."""
    parts = listed(value)
    if not isinstance(value, str) or not isinstance(parts, list):
        return value
    pairs = [part.partition("=") for part in parts]
    for name, _, text in pairs:
        if not name or not text:
            raise ValueError(f"{value!r}: write REGION=NUMBER, and a comma before the next")
    unique([name for name, _, _ in pairs])
    return {name: text for name, _, text in pairs}


def unique(parts: Iterable[str]) -> list[str]:
    """The parts. Raises ValueError that names one that is there twice."""
    found: list[str] = []
    for part in parts:
        if part in found:
            raise ValueError(f"{part} is named twice")
        found.append(part)
    return found
