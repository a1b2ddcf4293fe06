"""What was computed for whom at one router or batch runner, and which of it is not written yet.

Sums by day, key, tenant, model, region and kind stand in pages of ROWS_MAX. Adding to a row makes
its page due. A page is written whole with all that it has, so of a writing that may have been lost
nothing is lost but time, and one that arrives twice changes nothing. Pages are kept as long as
their day, and the one after it: if the stream turns out to have lost one, all are written anew.

Beyond SERIES_MAX accounts a day the rest is one account, `other`: sums stay whole.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from mesh.core.model.served_names import model_of
from mesh.session.cost import NOTHING, Cost
from mesh.session.record import OpenRequest
from schemas.ids import ModelId, RegionId, RouterId
from schemas.numbers import WHOLE_MAX
from schemas.usage import ROWS_MAX, UsageKind, UsagePage, UsageRow

SERIES_MAX = 8192
DAYS_MAX = 3  # in memory, where the stream takes nothing: what is older is lost
OTHER = "other"
_ONLINE, _BATCH, _COPY = UsageKind.ONLINE, UsageKind.BATCH, UsageKind.COPY


class Series(NamedTuple):
    """One account. `model`: as it is served, with its path."""

    key: str
    tenant: str
    model: str
    served_region: str
    kind: UsageKind


class _Row:
    """One account's sums on one day."""

    __slots__ = ("cached", "estimated", "output", "page", "requests", "series", "uncached")

    def __init__(self, series: Series, page: "_Page") -> None:
        self.series, self.page = series, page
        self.requests = self.uncached = self.cached = self.output = 0
        self.estimated = (0, 0, 0)  # requests, prompt, output

    def sums(self) -> UsageRow:
        key, tenant, model, served_region, kind = self.series
        requests, prompt, output = self.estimated
        return UsageRow(
            key=key, tenant=tenant, model=model, served_region=served_region, kind=kind,
            requests=_told(self.requests), uncached=_told(self.uncached),
            cached=_told(self.cached), output=_told(self.output),
            estimated_requests=_told(requests), estimated_prompt=_told(prompt),
            estimated_output=_told(output),
        )  # fmt: skip


def _told(number: int) -> int:
    """A sum as a page may tell it: one that is too large would make the page unreadable."""
    return min(number, WHOLE_MAX)


@dataclass(slots=True, eq=False)
class _Page:
    day: str
    number: int
    rows: list[_Row] = field(default_factory=list)


@dataclass(slots=True)
class _Day:
    rows: dict[Series, _Row] = field(default_factory=dict)
    pages: list[_Page] = field(default_factory=list)


class UsageBook:
    """One process's, since its start."""

    def __init__(
        self, region: RegionId, router: RouterId, epoch: int, regions: Iterable[str]
    ) -> None:
        """`regions`: of the mesh; what others serve counts as OTHER."""
        self._region, self._router, self._epoch = region, router, epoch
        self._regions = frozenset(regions)
        self._days: dict[str, _Day] = {}
        self._due: dict[_Page, None] = {}  # the one that has waited longest is first
        self._today: dict[Series, _Row] = {}
        self._day = ""

    def turn(self, day: str) -> None:
        """It is that day, as YYYY-MM-DD. Days of which all is written are forgotten, but for the
        one before."""
        if day != self._day:
            self._day = day
            self._today = self._days.setdefault(day, _Day()).rows
            waiting = {page.day for page in self._due}
            for old in sorted(self._days)[:-2]:
                if old not in waiting or len(self._days) > DAYS_MAX:
                    for page in self._days.pop(old).pages:
                        self._due.pop(page, None)

    def add(self, series: Series, cost: Cost) -> None:
        """A request has cost that, today."""
        row = self._today.get(series) or self._new(series)
        uncached, cached, output, is_prompt, is_output = cost
        row.requests += 1
        row.uncached += uncached
        row.cached += cached
        row.output += output
        if is_prompt or is_output:
            requests, prompt, outputs = row.estimated
            prompt += is_prompt * (uncached + cached)
            row.estimated = requests + 1, prompt, outputs + is_output * output
        self._due[row.page] = None

    @property
    def is_due(self) -> bool:
        """Whether something is not written."""
        return bool(self._due)

    def __len__(self) -> int:
        """Pages that are to be written."""
        return len(self._due)

    def due(self, most: int) -> Iterator[UsagePage]:
        """Pages to be written, each as it is now; what is added from here on makes it due again.
        One whose writing fails is `to_write` again."""
        for page in list(self._due)[:most]:
            del self._due[page]
            yield UsagePage(
                region=self._region,
                router=self._router,
                epoch=self._epoch,
                day=page.day,
                number=page.number,
                rows=tuple(row.sums() for row in page.rows),
            )

    def to_write(self, day: str, number: int) -> None:
        """That page was not written, or the stream has it no more."""
        if day in self._days:
            self._due[self._days[day].pages[number]] = None

    def to_write_all(self) -> None:
        """The stream has lost pages."""
        for day in self._days.values():
            self._due.update(dict.fromkeys(day.pages))

    def _new(self, given: Series) -> _Row:
        """The row of an account that is new today, or is known by its model's other name."""
        region = given.served_region if given.served_region in self._regions else OTHER
        series = given._replace(model=model_of(ModelId(given.model)), served_region=region)
        if series not in self._today and len(self._today) >= SERIES_MAX:
            series = Series(OTHER, OTHER, OTHER, region, given.kind)
            return self._today.get(series) or self._row(series)
        row = self._today.get(series) or self._row(series)
        # Its other name, unless of a region that an answer has invented: such names never end.
        if len(self._today) < SERIES_MAX and region == given.served_region:
            self._today[given] = row
        return row

    def _row(self, series: Series) -> _Row:
        pages = self._days[self._day].pages
        if not pages or len(pages[-1].rows) == ROWS_MAX:
            pages.append(_Page(self._day, len(pages)))
        row = self._today[series] = _Row(series, pages[-1])
        pages[-1].rows.append(row)
        return row


def account(book: UsageBook, record: OpenRequest, served_region: str, cost: Cost) -> None:
    """Put down what a request has cost that ended here. A peer's is its own router's to count."""
    request = record.request
    if cost is NOTHING or request.answer_inbox is not None:
        return
    kind = _COPY if request.shadow else _BATCH if request.offline else _ONLINE
    key, tenant = request.key_id, record.tenant or ""
    book.add(Series(key, tenant, request.model, served_region, kind), cost)
