"""dashboards/rules.yml: promtool takes it, and each alert fires when it should and not else."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.dashboards.alert_cases import CASES, Case
from tests.dashboards.test_mesh_dashboard import graphs
from tests.support.exported_metrics import EXPORTED, selectors

ROOT = Path(__file__).parents[2]
RULES = ROOT / "dashboards" / "rules.yml"
PAGE = (ROOT / "docs" / "alerts.md").read_text()
RUNBOOKS = "docs/alerts.md#"

rules: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
]
recorded = {rule["record"]: rule["expr"] for rule in rules if "record" in rule}
alerts = [rule for rule in rules if "alert" in rule]
names = sorted({rule["alert"] for rule in alerts})


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)


def unit_test(case: Case, series: dict[str, str], *, fires: bool) -> dict[str, Any]:
    """One case as promtool reads it."""
    alert = {
        "exp_labels": case.labels | {"severity": case.severity},
        "exp_annotations": {"summary": case.summary, "runbook": RUNBOOKS + case.alert.lower()},
    }
    expected = {"eval_time": f"{case.minutes}m", "alertname": case.alert}
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [expected | {"exp_alerts": [alert] if fires else []}],
    }


def unit_tests(folder: Path, name: str, tests: list[dict[str, Any]]) -> Path:
    """A file of them, with the rules of that alert alone: promtool evaluates all that it is given
    in each minute of each test."""
    own = [rule for rule in alerts if rule["alert"] == name]
    read = [r for r in rules if any(r.get("record", "no series") in one["expr"] for one in own)]
    group = {"groups": [{"name": name, "rules": read + own}]}
    (folder / f"{name}.rules.yml").write_text(yaml.safe_dump(group))
    files = [f"{name}.rules.yml"]
    path = folder / f"{name}.yml"
    path.write_text(
        yaml.safe_dump({"rule_files": files, "evaluation_interval": "1m", "tests": tests})
    )
    return path


@pytest.mark.prometheus
def test_prometheus_takes_the_rules(record_property):
    result = promtool("check", "rules", RULES)
    assert result.returncode == 0, result.stdout + result.stderr
    kinds = f"{len(alerts)} alerts, {len(recorded)} recorded"
    record_property("counted", f"promtool checked {len(rules)} rules: {kinds}")


@pytest.mark.prometheus
def test_each_alert_fires_when_it_should_and_not_else(tmp_path: Path, record_property):
    tests: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for case in CASES:
        tests[case.alert].append(unit_test(case, case.fires, fires=True))
        tests[case.alert].append(unit_test(case, case.fires | case.silent, fires=False))
    result = promtool("test", "rules", *(unit_tests(tmp_path, *each) for each in tests.items()))
    assert result.returncode == 0, result.stdout + result.stderr
    count = 2 * len(CASES)
    record_property("counted", f"promtool ran {count} unit tests of {len(names)} alerts")


@pytest.mark.prometheus
def test_the_unit_tests_can_fail(tmp_path: Path):
    wrong = [unit_test(CASES[0], CASES[0].fires, fires=False)]
    assert promtool("test", "rules", unit_tests(tmp_path, CASES[0].alert, wrong)).returncode == 1


def test_every_alert_has_a_case():
    assert {case.alert for case in CASES} == set(names)
    told = {(case.alert, case.severity) for case in CASES}
    assert told == {(rule["alert"], rule["labels"]["severity"]) for rule in alerts}


@pytest.mark.parametrize("rule", rules, ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_use_only_series_that_exist(rule: dict[str, Any]):
    asked = {selector.name for selector in selectors(rule["expr"])}
    assert asked - set(recorded) - {"up"} <= set(EXPORTED)


def test_every_recorded_series_is_used_by_an_alert():
    used = {s.name for rule in alerts for s in selectors(rule["expr"])}
    assert {name for name in recorded if name not in used} == set()


def test_every_alert_has_a_section_that_says_what_to_do():
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
    assert sorted(name for name in sections if name.startswith("Mesh")) == names
    for rule in alerts:
        assert rule["annotations"]["runbook"] == RUNBOOKS + rule["alert"].lower()
        section = sections[rule["alert"]]
        assert "**Look at**" in section and "**Do**" in section, rule["alert"]


def test_the_page_speaks_of_panels_that_are_there():
    named = set(re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", PAGE))
    assert named and named <= {panel["title"] for panel in graphs}


def test_the_stack_of_compose_reads_the_rules():
    config = yaml.safe_load((ROOT / "infra/compose/prometheus.yml").read_text())
    services = yaml.safe_load((ROOT / "infra/compose.yaml").read_text())["services"]
    [file] = config["rule_files"]
    assert f"../dashboards/rules.yml:{file}:ro" in services["prometheus"]["volumes"]
