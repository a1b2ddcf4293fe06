"""Regions whose day is not the same: SkyWalker's skew, and a whole day.

Without a rate it is SkyWalker's experiment (§5.2, "Diurnal pattern", Figure 10): closed-loop chat
with 120 clients in the US and 40 each in Europe and Asia, which is the US' working hours standing
still. With a rate it is the day itself: open-loop chat at that mean rate over all regions, each
following one measured curve by its own clock. `duration_s` is then one day, whatever its length:
3,600 plays 24 hours in one.

The curve is the hourly rate, over seven days and 162 clients, of ServeGen's `language/m-large`
(Xiang et al. 2025, Alibaba's production traffic; data Apache-2.0), divided by its mean. Its top
is 1.19 at 20:00 and its trough 0.83 at 07:00: traffic of services, flatter than people's. A
region's own demand varies more (SkyWalker Figure 3a: 2.9 to 32.6 times between its hours), so
`swing` raises the curve's distance from its mean; 1 is the measured shape. It can't go below 0.
"""

from collections.abc import Mapping

from mesh.sim.workload import Workload
from mesh.sim.workloads.chat import DURATION_S, WILDCHAT, Habits, talk
from mesh.sim.workloads.loops import Clients, given
from schemas.ids import RegionId

CLIENTS: Clients = {RegionId("us"): 120, RegionId("eu"): 40, RegionId("ap"): 40}
HOURLY = (  # from 00:00 to 23:00
    *(0.979, 0.955, 0.957, 0.907, 0.902, 0.891, 0.841, 0.828),
    *(0.832, 0.916, 1.021, 1.090, 1.013, 1.038, 1.087, 1.057),
    *(1.044, 1.045, 1.018, 1.166, 1.189, 1.078, 1.074, 1.070),
)
SWING = 3.0  # ours: the day's top is then 3.2 times its trough, the least of SkyWalker's Figure 3a
UTC_OFFSETS_H: Mapping[str, float] = {"us": -5.0, "eu": 1.0, "ap": 8.0}


class Day:
    """24 hours in `day_s` seconds, by each region's own clock. The run begins at 00:00 UTC."""

    def __init__(self, day_s: float, offsets_h: Mapping[RegionId, float], swing: float) -> None:
        self._day_s = day_s
        self._offsets_h = offsets_h
        self._hourly = tuple(max(0.0, 1 + swing * (rate - 1)) for rate in HOURLY)

    def peak(self, region: RegionId) -> float:
        """The day's highest rate, as a multiple of its mean."""
        return max(self._hourly)

    def at(self, region: RegionId, at_s: float) -> float:
        """The rate at a time, as a multiple of the day's mean; straight lines between hours."""
        hour = (at_s / self._day_s * 24 + self._offsets_h[region]) % 24
        place = int(hour) % 24
        here, following = self._hourly[place], self._hourly[(place + 1) % 24]
        return here + (hour - int(hour)) * (following - here)


def offsets_of(clients: Clients) -> dict[RegionId, float]:
    """Each region's hours from UTC: known ones by name, others spread around the globe."""
    return {
        region: UTC_OFFSETS_H.get(region.split("-")[0], 24.0 * place / len(clients))
        for place, region in enumerate(clients)
    }


def diurnal(
    *,
    clients: Clients | None = None,
    seed: int = 0,
    duration_s: float | None = None,
    rate_per_s: float | None = None,
    utc_offsets_h: Mapping[RegionId, float] | None = None,
    swing: float = SWING,
    habits: Habits = WILDCHAT,
) -> Workload:
    """The skewed closed loop, or with `rate_per_s` a day of `duration_s` seconds, open loop."""
    clients = given(clients, CLIENTS)
    duration_s = given(duration_s, DURATION_S)
    offsets_h = offsets_of(clients) | dict(utc_offsets_h or {})
    day = Day(duration_s, offsets_h, swing) if rate_per_s is not None else None
    return talk("diurnal", clients, habits, duration_s, rate_per_s, seed, day)
