"""In which order held requests are tried."""

from enum import StrEnum


class HoldOrder(StrEnum):
    """FIRST_COME: by time of arrival. HIT_RATIO: Preble's priority groups by hit ratio."""

    FIRST_COME = "first-come"
    HIT_RATIO = "hit-ratio"
