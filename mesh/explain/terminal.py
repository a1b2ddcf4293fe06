"""Texts and times as a terminal may be given them."""

from datetime import UTC, datetime


def printable(text: str) -> str:
    """Names and ids come from clients and peers: what a terminal would obey is escaped."""
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape", "backslashreplace").decode()
        for one in text
    )


def clock(at: float) -> str:
    """The time of day; the seconds themselves where they are none."""
    try:
        at_utc = datetime.fromtimestamp(at, UTC).replace(tzinfo=None)
        return f"{at_utc.isoformat(sep=' ', timespec='milliseconds')} UTC"
    except (OverflowError, ValueError, OSError):
        return f"{at:.3f} s"
