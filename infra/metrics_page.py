"""A process's Prometheus page, in the format that its reader accepts, and what it has about the
process itself, under the names that every Prometheus client uses.

The client library's own collector reads the time of boot in `/proc/stat`. The systemd units hide
that file (`ProcSubset=pid`), and the collector then shows nothing at all.
"""

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

OPEN_METRICS = "application/openmetrics-text"
TEXT, OPEN_METRICS_TEXT = CONTENT_TYPE_PLAIN_0_0_4, openmetrics.CONTENT_TYPE_LATEST


_PROC = Path("/proc/self")
_STARTED_FIELD = 19  # of `/proc/self/stat`, after the name: ticks since boot; see proc(5)


class ProcessMetrics(Collector):
    """`process_*` of the process that collects; without `/proc` there is less of it."""

    def __init__(self) -> None:
        self._started_at = _started_at()

    def collect(self) -> Iterator[Metric]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        yield CounterMetricFamily(
            "process_cpu_seconds",
            "Time on processors, user and system.",
            value=used.ru_utime + used.ru_stime,
        )
        if self._started_at is not None:
            yield GaugeMetricFamily(
                "process_start_time_seconds",
                "When it started, in seconds of Unix time.",
                value=self._started_at,
            )
        try:
            pages = (_PROC / "statm").read_text().split()
            open_files = sum(1 for _ in (_PROC / "fd").iterdir())
        except OSError:
            return
        virtual, resident = (int(count) * resource.getpagesize() for count in pages[:2])
        files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        for name, about, value in (
            ("virtual_memory_bytes", "Address space.", virtual),
            ("resident_memory_bytes", "Memory that it occupies.", resident),
            ("open_fds", "Open files and connections.", open_files),
            ("max_fds", "Most of them.", files_max),
        ):
            yield GaugeMetricFamily(f"process_{name}", about, value=float(value))


def _started_at() -> float | None:
    """When this process started, in seconds of Unix time; None where `/proc` does not show it."""
    try:
        fields = (_PROC / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    since_boot_s = int(fields[_STARTED_FIELD]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s)


def add_process_metrics(registry: CollectorRegistry) -> None:
    """Add `process_*` of this process: processor time, memory, open files, start."""
    registry.register(ProcessMetrics())


def metrics_page(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The page and its content type. OpenMetrics, which has exemplars, where `accept` names it."""
    if OPEN_METRICS in accept.lower():
        page: bytes = openmetrics.generate_latest(registry)  # type: ignore[no-untyped-call]
        return page, OPEN_METRICS_TEXT
    return generate_latest(registry), TEXT
