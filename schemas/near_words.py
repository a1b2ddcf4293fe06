"""What a person may have meant by a word that nobody knows."""

import difflib
from collections.abc import Collection


def did_you_mean(wrong: str, known: Collection[str], *, prefix: str = "") -> str:
    """The end of an error line: the known word nearest to `wrong`, or all there are.

    All begin with `prefix`, which is not compared: it would make any two of them alike.
    """
    ends = [word.removeprefix(prefix) for word in known]
    near = difflib.get_close_matches(wrong.removeprefix(prefix), ends, n=1)
    if near:
        return f'; did you mean "{prefix}{near[0]}"?'
    return f"; there are {', '.join(known) or 'none'}"
