"""What a person may have meant by a word that nobody knows."""

import difflib
from collections.abc import Collection


def did_you_mean(wrong: str, known: Collection[str]) -> str:
    """The end of an error line: the known word nearest to `wrong`, or all there are."""
    near = difflib.get_close_matches(wrong, known, n=1)
    return f'; did you mean "{near[0]}"?' if near else f"; there are {', '.join(known) or 'none'}"
