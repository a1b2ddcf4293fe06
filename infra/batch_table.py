"""mesh.toml's `[batch]`: what each region with batch runners keeps of files and jobs, at most."""

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Annotated, Self

from pydantic import Field, model_validator

from schemas.ids import REGION_ROUTERS_MAX, RegionId, RouterId, ValidRouterId
from schemas.settings import WHOLE, Advice, Option, Table

MEBIBYTES_MAX = 1 << 20
STATE_MIB = 1024  # of a region's server for heartbeats and leases, where mesh.toml does not say
STATE_MIB_MIN = 64  # 4,096 replicas' last heartbeats are 8 MiB
TASKS_MIB = 4  # of BATCH_TASKS: a task has no body, and a job two at most
OUTPUT_SHARE = 0.2  # of files_mib that uploads leave for outputs of jobs
RECORDS_OF_A_MIB = 250  # of files: 4 KiB each, of which they have a half

StoreMebibytes = Annotated[int, Field(strict=True, ge=16, le=MEBIBYTES_MAX), WHOLE]
RunnerNames = Annotated[
    tuple[ValidRouterId, ...],
    Field(max_length=REGION_ROUTERS_MAX),
    Advice('write a list of names, like ["batch-0"]'),
]
Price = Annotated[float, Field(strict=True, ge=0, le=10_000)]
Days = Annotated[int, Field(strict=True, ge=1, le=365), WHOLE]


class BatchTable(Table):
    """`[batch]`: limits of every region's batch jobs. A full store refuses what is new."""

    files_mib: Annotated[StoreMebibytes, Option("Uploaded files and outputs, on disk.")] = 4096
    results_mib: Annotated[
        StoreMebibytes, Option("Answers of jobs that are not finished, on disk.")
    ] = 2048
    lines_mib: Annotated[StoreMebibytes, Option("Lines that wait, on disk.")] = 2048
    jobs_mib: Annotated[StoreMebibytes, Option("The jobs themselves, on disk.")] = 64
    file_mib_max: Annotated[
        Annotated[int, Field(strict=True, ge=1, le=8192), WHOLE], Option("Of one upload.")
    ] = 512
    files_max: Annotated[
        Annotated[int, Field(strict=True, ge=2, le=50_000), WHOLE], Option("Uploaded files.")
    ] = 10_000
    lines_max: Annotated[
        Annotated[int, Field(strict=True, ge=1, le=1_000_000), WHOLE], Option("Lines of one job.")
    ] = 50_000
    jobs_max: Annotated[
        Annotated[int, Field(strict=True, ge=1, le=10_000), WHOLE],
        Option("Jobs that have not ended."),
    ] = 1_000
    output_days: Annotated[Days, Option("That files are kept, where the client does not say.")] = 30
    jobs_days: Annotated[Days, Option("That jobs are listed after their end.")] = 30

    @property
    def records_mib(self) -> int:
        """Of files' records: outputs of jobs are not counted in `files_max`, and may be as many."""
        return 2 * -(-self.files_max // RECORDS_OF_A_MIB)

    @property
    def uploads_mib(self) -> float:
        """How full uploads may make the store of files: the rest is for outputs of jobs."""
        return self.files_mib * (1 - OUTPUT_SHARE)

    @property
    def disk_mib(self) -> int:
        """What all of it may take together."""
        written = self.files_mib + self.results_mib + self.lines_mib + self.jobs_mib
        return written + self.records_mib + TASKS_MIB

    @model_validator(mode="after")
    def _room_for_one_file(self) -> Self:
        if self.file_mib_max > self.uploads_mib:
            needed = ceil(self.file_mib_max / (1 - OUTPUT_SHARE))
            raise ValueError(
                f"files_mib ({self.files_mib}) must be at least {needed} for files of file_mib_max "
                f"({self.file_mib_max}), as {OUTPUT_SHARE:.0%} of it is for outputs of jobs"
            )
        return self


def jetstream_disk_mib(configured: int | None, batch: BatchTable, *, has_runners: bool) -> int:
    """What a region's JetStream may take on disk."""
    return configured or STATE_MIB + batch.disk_mib * has_runners


def batch_problems(
    names: Mapping[RegionId, tuple[tuple[RouterId, ...], tuple[RouterId, ...]]],
    disk_mib: int | None,
    batch: BatchTable,
) -> Iterator[str]:
    """Errors of batch runners and what their jobs may take.

    `names`: of each region's runners and routers: on the bus a runner is one more router.
    `disk_mib`: what JetStream may take, as it is configured.
    """
    for region, (runners, routers) in names.items():
        for name in sorted(set(runners) & set(routers)):
            yield f'regions.{region}.batch_runners: "{name}" is a router\'s name; rename it'
    needed = batch.disk_mib + STATE_MIB_MIN
    has_runners = any(runners for runners, _ in names.values())
    if has_runners and disk_mib is not None and disk_mib < needed:
        yield (
            f"nats.jetstream_disk_mib: {disk_mib} does not hold what [batch] may take, with "
            f"{batch.records_mib + TASKS_MIB} MiB for records and {STATE_MIB_MIN} for the region's "
            f"state; write {needed} or more, leave it out, or make files_mib, results_mib or "
            "lines_mib smaller"
        )
