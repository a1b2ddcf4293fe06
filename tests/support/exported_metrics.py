"""Every series that routers and batch runners export, and the series that PromQL names."""

import random
from typing import Any, NamedTuple

import promql_parser as promql
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from mesh.adapters.metrics import BatchMetrics, RouterMetrics
from mesh.adapters.runner_metrics import RunnerMetrics
from mesh.core.model.settings import RouterSettings
from mesh.core.router import RouterCore
from mesh.core.state import RouterState
from schemas.batch import BatchJob
from schemas.ids import RegionId, RouterId

# What Grafana puts in place of its own variables, as far as PromQL's grammar cares.
BUILT_IN = {"$__rate_interval": "1m", "$__interval": "1m", "$__range": "15m"}
SERIES_SUFFIXES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
}


class Family(NamedTuple):
    """One metric of the code."""

    name: str
    type: str
    labels: frozenset[str]


def exported_series() -> dict[str, Family]:
    """Every series of a router's or batch runner's page, by the name that queries use."""
    core = RouterCore(
        RouterState(
            region=RegionId("us"),
            router=RouterId("r1"),
            epoch=1,
            settings=RouterSettings(),
            dice=random.Random(1),
        )
    )
    router = RouterMetrics(core, CollectorRegistry())
    batches = BatchMetrics(router.registry)
    runner = RunnerMetrics(RegionId("us"), ())
    runner.read(IdleRunner())
    labels = {
        metric._name: metric._labelnames
        for metrics in (router, batches, runner)
        for metric in vars(metrics).values()
        if isinstance(metric, MetricWrapperBase)
    }
    series: dict[str, Family] = {}
    for found in (*router.registry.collect(), *runner.registry.collect()):
        names = labels.get(found.name) or getattr(found, "_labelnames", ())
        family = Family(found.name, found.type, frozenset(names))
        for suffix in SERIES_SUFFIXES[found.type]:
            known = series.setdefault(found.name + suffix, family)
            assert known == family, "routers and batch runners mean the same by a name"
    return series


class IdleRunner:
    """What a batch runner without jobs shows."""

    def open_jobs(self) -> list[BatchJob]:
        return []

    def lines_held(self) -> int:
        return 0

    def lines_tried(self) -> int:
        return 0


def parsed(expression: str) -> Any:
    """The expression as Prometheus would read it. Raises ValueError if it would not."""
    for variable, value in BUILT_IN.items():
        expression = expression.replace(variable, value)
    return promql.parse(expression)


def parts(expression: str) -> list[Any]:
    """Every node of the expression's syntax tree."""
    found: list[Any] = []
    promql.walk(parsed(expression), found.append)
    return found


def selectors(expression: str) -> list[Any]:
    return [part for part in parts(expression) if isinstance(part, promql.VectorSelector)]


EXPORTED = exported_series()
