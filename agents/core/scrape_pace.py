"""How often the engine is scraped.

A busy engine every `busy_s`, an idle one every IDLE_S. One at rest every REST_S: it has no request
of the agent's, its numbers have been the same STILL times in a row, and a connection to it is open,
whose end would tell that it has gone. The host begins anew (`woken`) when a request goes to the
engine or that connection ends, so neither is noticed later than at IDLE_S. What others send to the
engine is, by REST_S at most, and so is a death that ends no connection: of a host, of an engine
behind a proxy, or one that hangs.
"""

from agents.core.events import PAGES_GOOD, EngineReading, EngineScraped, ScrapeFailed

IDLE_S = 0.1
REST_S = 1.0  # and the list of models, due each second, with every second one
STILL = 10


class ScrapePace:
    """Of one engine."""

    def __init__(self, busy_s: float) -> None:
        self.busy_s = busy_s
        self._reading: EngineReading | None = None
        self._same = 0  # scrapes in a row, while it was idle

    @property
    def rests(self) -> bool:
        return self._same >= STILL

    def woken(self) -> None:
        """Something may change, or has."""
        self._same = 0

    def next_in_s(
        self, scrape: EngineScraped | ScrapeFailed, *, is_busy: bool, is_connected: bool
    ) -> float:
        """Seconds from the beginning of this scrape to that of the next one."""
        reading = None
        if isinstance(scrape, EngineScraped) and scrape.pages == PAGES_GOOD:
            reading = scrape.reading
        is_same = is_connected and not is_busy and reading is not None and reading == self._reading
        self._same = self._same + 1 if is_same else 0
        self._reading = reading
        if is_busy:
            return self.busy_s
        return max(self.busy_s, REST_S if self.rests else IDLE_S)
