"""A process's Prometheus page, in the format that its reader accepts."""

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics

OPEN_METRICS = "application/openmetrics-text"
TEXT, OPEN_METRICS_TEXT = CONTENT_TYPE_PLAIN_0_0_4, openmetrics.CONTENT_TYPE_LATEST


def add_process_metrics(registry: CollectorRegistry) -> None:
    """Add `process_*` of this process: CPU seconds, memory, open files, start time; Linux alone."""
    ProcessCollector(registry=registry)


def metrics_page(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The page and its content type. OpenMetrics, which has exemplars, where `accept` names it."""
    if OPEN_METRICS in accept.lower():
        page: bytes = openmetrics.generate_latest(registry)  # type: ignore[no-untyped-call]
        return page, OPEN_METRICS_TEXT
    return generate_latest(registry), TEXT
