"""How the streams of the account BATCH are set. `mesh infra streams` and `mesh up` make them."""

from dataclasses import replace
from typing import Any

from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from infra.batch_table import TASKS_MIB, BatchTable
from schemas.batch import (
    BUCKET_FILES,
    BUCKET_JOBS,
    JOB_BYTES_MAX,
    STREAM_FILE_RECORDS,
    STREAM_FILES,
    STREAM_JOBS,
    STREAM_LINES,
    STREAM_RESULTS,
    STREAM_TASKS,
    line_subject,
    result_subject,
    task_subject,
)

MEBIBYTE = 1024 * 1024
HEADER_BYTES = 4096  # of a record: JetStream's own
RECORD_BYTES_MAX = 8192  # of a file


def kept(limits: BatchTable, servers: int = 1) -> tuple[StreamConfig, ...]:
    """Those of one region, all on disk, on each of so many servers. A full one refuses what is new
    and keeps what it has."""
    files, jobs, results = limits.files_mib, limits.jobs_mib, limits.results_mib
    lines = _one_a_subject(
        STREAM_LINES, "Lines without a result", line_subject("*", "*"), limits.lines_mib
    )
    tasks = _one_a_subject(
        STREAM_TASKS, "What batch runners do for whole jobs", task_subject("*", "*"), TASKS_MIB
    )
    found = (
        # As NATS' own tools make an object store and a bucket.
        _stream(
            STREAM_FILES,
            "Contents of files",
            (f"$O.{BUCKET_FILES}.C.>", f"$O.{BUCKET_FILES}.M.>"),
            files,
            allow_rollup_hdrs=True,
        ),
        _bucket(STREAM_FILE_RECORDS, "Files", BUCKET_FILES, limits.records_mib, RECORD_BYTES_MAX),
        _bucket(STREAM_JOBS, "Batch jobs", BUCKET_JOBS, jobs, JOB_BYTES_MAX),
        replace(tasks, retention=RetentionPolicy.WORK_QUEUE),
        replace(lines, retention=RetentionPolicy.WORK_QUEUE),
        _one_a_subject(STREAM_RESULTS, "Results of lines", result_subject("*", "*"), results),
    )
    return tuple(replace(config, num_replicas=servers) for config in found)


def _bucket(
    name: str, description: str, bucket: str, mib: int, record_bytes_max: int
) -> StreamConfig:
    return _stream(
        name,
        description,
        (f"$KV.{bucket}.>",),
        mib,
        allow_rollup_hdrs=True,
        deny_delete=True,
        max_msgs_per_subject=1,
        max_msg_size=record_bytes_max + HEADER_BYTES,
    )


def _one_a_subject(name: str, description: str, subject: str, mib: int) -> StreamConfig:
    """A stream that refuses a second message of a subject while it has the first."""
    options = {"max_msgs_per_subject": 1, "discard_new_per_subject": True}
    return _stream(name, description, (subject,), mib, **options)


def _stream(
    name: str, description: str, subjects: tuple[str, ...], mib: int, **more: Any
) -> StreamConfig:
    return StreamConfig(
        name=name,
        description=description,
        subjects=list(subjects),
        storage=StorageType.FILE,
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.NEW,
        max_bytes=mib * MEBIBYTE,
        allow_direct=True,
        **more,
    )
