"""dashboards/mesh.json can be imported, and asks only for what the code exports.

The metric names, types and labels come from the router's own collectors; labels that operators
add while scraping come from the Prometheus configuration of infra/compose.yaml.
"""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import yaml

from tests.support.exported_metrics import BUILT_IN, EXPORTED, parts, selectors

ROOT = Path(__file__).parents[2]
README = (ROOT / "dashboards" / "README.md").read_text()
GRID_COLUMNS = 24

dashboard: dict[str, Any] = json.loads((ROOT / "dashboards" / "mesh.json").read_text())
panels: list[dict[str, Any]] = dashboard["panels"]
rows = [panel for panel in panels if panel["type"] == "row"]
graphs = [panel for panel in panels if panel["type"] != "row"]
variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}


def queries() -> Iterator[tuple[str, str]]:
    """Every PromQL expression, with the title of its panel."""
    for panel in graphs:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def labels_asked(expression: str) -> set[str]:
    """Labels that matchers and `by` clauses of the expression name."""
    matched = {m.name for selector in selectors(expression) for m in selector.matchers.matchers}
    grouped = (
        part.modifier for part in parts(expression) if isinstance(part, promql.AggregateExpr)
    )
    return matched.union(*(modifier.labels for modifier in grouped if modifier))


def scrape_labels() -> set[str]:
    """Labels that Prometheus adds: its own, and those of the scrape configuration."""
    config = yaml.safe_load((ROOT / "infra" / "compose" / "prometheus.yml").read_text())
    targets = [target for job in config["scrape_configs"] for target in job["static_configs"]]
    return {"job", "instance"}.union(*(target["labels"] for target in targets))


QUERIES = list(queries())


def test_queries_ask_only_for_series_that_the_code_exports():
    for title, expression in QUERIES:
        unknown = [s.name for s in selectors(expression) if s.name not in EXPORTED]
        assert not unknown, f"{title}: no such series; there are {', '.join(sorted(EXPORTED))}"


def test_queries_ask_only_for_labels_that_the_series_have():
    scraped = scrape_labels()
    for title, expression in QUERIES:
        has = set(scraped)
        for selector in selectors(expression):
            has |= EXPORTED[selector.name].labels
            has |= {"le"} if selector.name.endswith("_bucket") else set()
        assert labels_asked(expression) <= has, f"{title}: {labels_asked(expression) - has}"


def test_rates_are_of_what_only_grows():
    for title, expression in QUERIES:
        calls = [part for part in parts(expression) if isinstance(part, promql.Call)]
        ranges = [call for call in calls if call.func.name in ("rate", "increase")]
        rated = {call.args[0].vector_selector.name for call in ranges}
        growing = {s.name for s in selectors(expression) if EXPORTED[s.name].type != "gauge"}
        assert rated == growing, title


def test_legends_use_labels_that_the_result_has():
    for title, expression in QUERIES:
        shown = [t for p in graphs for t in p["targets"] if t["expr"] == expression]
        (legend,) = {target["legendFormat"] for target in shown}
        used = set(re.findall(r"{{(\w+)}}", legend))
        assert used, f"{title}: lines without a name"
        assert used <= labels_asked(expression), title


def test_every_metric_of_the_code_is_shown():
    shown = {EXPORTED[s.name] for _, query in QUERIES for s in selectors(query)}
    ours = {family for family in EXPORTED.values() if family.name.startswith("mesh_")}
    assert ours <= shown


def test_is_a_dashboard_that_grafana_imports():
    assert dashboard["uid"] and dashboard["title"] and dashboard["schemaVersion"] >= 36
    assert "id" not in dashboard, "an id belongs to one Grafana's database"
    identifiers = [panel["id"] for panel in panels]
    assert len(set(identifiers)) == len(identifiers)
    for panel in graphs:
        assert panel["title"] and panel["targets"]
        question, is_asked, _ = panel["description"].partition("?")
        assert is_asked and "." not in question, "a description begins with the panel's question"
        assert panel["fieldConfig"]["defaults"]["unit"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)


def test_every_source_of_data_is_the_one_chosen_at_the_top():
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    others = [variable for name, variable in variables.items() if name != "datasource"]
    targets = [target for panel in graphs for target in panel["targets"]]
    assert all(each["datasource"] == chosen for each in (*graphs, *targets, *others))


def test_variables_are_defined_and_used():
    used = {name for _, query in QUERIES for name in re.findall(r"\$\w+", query)}
    assert used - set(BUILT_IN) == {f"${name}" for name in variables if name != "datasource"}


def test_panels_fill_the_grid_without_covering_each_other():
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= GRID_COLUMNS, panel["title"]
        columns = range(place["x"], place["x"] + place["w"])
        covered = set(itertools.product(columns, range(place["y"], place["y"] + place["h"])))
        assert not cells & covered, panel["title"]
        cells |= covered
    assert panels[0]["type"] == "row"
    assert [panel["gridPos"]["y"] for panel in panels] == sorted(p["gridPos"]["y"] for p in panels)


def test_readme_explains_the_rows_in_order():
    titles = [row["title"] for row in rows]
    assert re.findall(r"^## (.+\?)$", README, re.MULTILINE) == titles


def test_readme_speaks_of_panels_that_are_there():
    named = re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", README)
    titles = [panel["title"] for panel in graphs]
    missing = [name for name in named if not any(title.startswith(name) for title in titles)]
    assert named and not missing


def test_exemplars_lead_to_traces():
    """Points of the TTFT panel carry the label that the data source links to a Jaeger."""
    [ttft] = [panel for panel in graphs if panel["title"] == "Time to first token"]
    assert all(target["exemplar"] for target in ttft["targets"])
    folder = ROOT / "infra" / "compose" / "grafana" / "datasources"
    sources = yaml.safe_load((folder / "prometheus.yaml").read_text())["datasources"]
    by_type = {source["type"]: source for source in sources}
    [link] = by_type["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert link["name"] == "trace_id", "as mesh/adapters/metrics.py names it"
    assert link["datasourceUid"] == by_type["jaeger"]["uid"]
    services = yaml.safe_load((ROOT / "infra" / "compose.yaml").read_text())["services"]
    assert "--enable-feature=exemplar-storage" in services["prometheus"]["command"]
    jaeger_host = by_type["jaeger"]["url"].split("/")[2].split(":")[0]
    assert services[jaeger_host]["image"].startswith("jaegertracing/jaeger")
