"""The examples of infra/entry lead to what is there: the regions, their ports, their probes."""

import ipaddress
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.topology import DEFAULT_FILE, load
from schemas import http

HERE = Path(__file__).parents[3] / "infra" / "entry"
MESH = load(DEFAULT_FILE)
DOCUMENTED = [
    ipaddress.ip_network(f"{net}/24") for net in ("192.0.2.0", "198.51.100.0", "203.0.113.0")
]

ZONE = [line.split(";")[0].split() for line in (HERE / "zone.db").read_text().splitlines()]


def is_documented(address: str) -> bool:
    return any(ipaddress.ip_address(address) in network for network in DOCUMENTED)


class TestRoute53:
    """A CloudFormation template: by its JSON, as far as that says what AWS would do."""

    template: dict[str, Any] = json.loads((HERE / "route53.json").read_text())
    resources: dict[str, Any] = template["Resources"]
    records: list[dict[str, Any]] = resources["Entry"]["Properties"]["RecordSets"]

    def test_every_region_has_a_latency_record(self):
        assert [each["SetIdentifier"] for each in self.records] == [
            f"mesh-{r}" for r in MESH.regions
        ]
        assert len({each["Region"] for each in self.records}) == len(self.records)
        assert {json.dumps(each["Name"]) for each in self.records} == {'{"Ref": "Name"}'}

    def test_a_record_counts_while_its_own_address_is_ready(self):
        for record in self.records:
            check = self.resources[record["HealthCheckId"]["Ref"]]
            config = check["Properties"]["HealthCheckConfig"]
            assert check["Type"] == "AWS::Route53::HealthCheck"
            assert config["ResourcePath"] == http.READY
            assert [config["IPAddress"]] == record["ResourceRecords"]
            assert int(record["TTL"]) + config["RequestInterval"] * config["FailureThreshold"] <= 60

    def test_whatever_is_referred_to_is_there(self):
        text = json.dumps(self.template)
        named = set(re.findall(r'"Ref": "(\w+)"', text)) | set(re.findall(r"\$\{(\w+)\}", text))
        assert named == named & (set(self.resources) | set(self.template["Parameters"]))
        assert set(self.template["Parameters"]) <= named


class TestEnvoy:
    """By structure: what Envoy itself says of it needs its binary, as the README tells."""

    config: dict[str, Any] = yaml.safe_load((HERE / "envoy.yaml").read_text())
    resources: dict[str, Any] = config["static_resources"]
    [cluster] = resources["clusters"]
    [listener] = resources["listeners"]
    manager: dict[str, Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]
    [route] = manager["route_config"]["virtual_hosts"][0]["routes"]

    def test_it_knows_every_region_by_its_port_each_with_its_own_priority(self):
        found = {}
        for place, group in enumerate(self.cluster["load_assignment"]["endpoints"]):
            assert group["priority"] == place  # without a hole, as Envoy wants it
            [endpoint] = group["lb_endpoints"]
            socket = endpoint["endpoint"]["address"]["socket_address"]
            region = group["locality"]["region"]
            assert socket["address"] == f"{region}.llm.example.com"
            found[region] = socket["port_value"]
        assert found == {name: region.http.port for name, region in MESH.regions.items()}

    def test_only_regions_that_are_ready_are_asked(self):
        [check] = self.cluster["health_checks"]
        assert check["http_health_check"]["path"] == http.READY
        assert self.cluster["common_lb_config"]["healthy_panic_threshold"]["value"] == 0

    def test_nothing_that_streams_is_cut_by_a_timer(self):
        assert self.manager["stream_idle_timeout"] == self.route["route"]["timeout"] == "0s"

    def test_what_may_be_asked_again_has_not_begun(self):
        policy = self.route["route"]["retry_policy"]
        assert set(policy["retry_on"].split(",")) == {
            "connect-failure",
            "refused-stream",
            "reset-before-request",
            "retriable-status-codes",
        }
        assert policy["retriable_status_codes"] == [http.Fault.NO_REPLICA.value.status]
        assert policy["num_retries"] == len(MESH.regions) - 1
        assert "previous_priorities" in policy["retry_priority"]["name"]

    def test_every_extension_names_its_type(self):
        def typed(node: Any) -> list[dict[str, Any]]:
            if isinstance(node, list):
                return [found for each in node for found in typed(each)]
            if not isinstance(node, dict):
                return []
            here = [node["typed_config"]] if "typed_config" in node else []
            return here + [found for each in node.values() for found in typed(each)]

        types = [config["@type"] for config in typed(self.config)]
        assert len(types) == 3
        assert all(re.fullmatch(r"type\.googleapis\.com/envoy(\.\w+)+\.v3\.\w+", t) for t in types)
        assert self.route["route"]["cluster"] == self.cluster["name"]


class TestZone:
    """RFC 1035's master file, in the form that the example uses: owner, IN, type, value."""

    def test_each_region_has_a_name_and_its_address_is_in_the_name_of_all(self):
        addresses = [line for line in ZONE if line[1:3] == ["IN", "A"]]
        named = {owner: value for owner, *_, value in addresses if owner != "@"}
        everybody = [value for owner, *_, value in addresses if owner == "@"]
        assert list(named) == list(MESH.regions)
        assert sorted(everybody) == sorted(named.values())
        assert all(map(is_documented, everybody))

    def test_it_begins_as_a_zone_must_and_is_not_remembered_for_long(self):
        assert ["$ORIGIN", "llm.example.com."] in ZONE
        [ttl] = [int(line[1]) for line in ZONE if line[:1] == ["$TTL"]]
        assert ttl <= 60
        assert [line[:3] for line in ZONE].count(["@", "IN", "SOA"]) == 1


def test_the_announced_address_is_withdrawn_by_the_same_probe():
    text = (HERE / "bird.conf").read_text()
    assert text.count("{") == text.count("}")
    assert http.READY in text
    [announced] = re.findall(r"net = ([\d.]+)/32", text)
    assert f"ip addr add {announced}/32" in text and is_documented(announced)
    port = TestEnvoy.listener["address"]["socket_address"]["port_value"]
    assert f"127.0.0.1:{port}{http.READY}" in text


@pytest.mark.parametrize("example", sorted(p.name for p in HERE.iterdir() if p.suffix != ".md"))
def test_every_example_is_explained(example):
    assert f"]({example})" in (HERE / "README.md").read_text()
