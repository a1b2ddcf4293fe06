"""What follows from a region's own trouble says so; nothing else is explained away."""

from mesh.doctor.connectivity import ServerUnreachable
from mesh.doctor.examination import described_version
from mesh.doctor.findings import CheckResult, Finding, Remedy, is_healthy
from mesh.doctor.manual_commands import with_causes

OK, WARNING, BAD, UNKNOWN = CheckResult
DEAD = ServerUnreachable("nats://eu:4222", "nobody listens there", listens=False)


class StubCommands:
    def server(self, region, silence):
        return Remedy(f"{region} at {silence.url}", "true")

    def program(self, kind, region, name):
        return Remedy(f"{kind} {name} of {region}", "true")

    def engine(self, replica):
        return Remedy(f"engine of {replica}", "true")

    def stream(self, region):
        return Remedy(f"streams of {region}", "true")


commands = StubCommands()


def finding(region, check, about, verdict, peer=None):
    return Finding(region, check, about, verdict, "", peer=peer)


def seen_from(region, peer, verdict, *, server_link=BAD):
    return [
        finding(region, "link", peer, verdict, peer),
        finding(region, "round trip", peer, verdict, peer),
        finding(region, "lease", f"write for {peer}", UNKNOWN if verdict is BAD else OK, peer),
        finding(region, "server link", peer, server_link, peer),
    ]


def test_links_to_a_dead_server_follow_from_it_in_every_region():
    found = [*seen_from("us", "eu", BAD), *seen_from("ap", "eu", BAD), *seen_from("us", "ap", OK)]
    first, *others = with_causes(found, {"eu": DEAD}, commands)
    assert (first.region, first.check, first.about, first.verdict) == ("eu", "bus", "server", BAD)
    assert first.remedy == Remedy("eu at nats://eu:4222", "true") and first.because is None
    assert first.detail.endswith("nobody listens there; nor is it reached from us, ap")
    assert [one.because for one in others] == ["eu"] * 8 + [None] * 4
    assert [one.verdict for one in others] == [one.verdict for one in found]
    assert not is_healthy([first, *others])


def test_a_server_that_others_reach_explains_nothing_and_needs_no_restart():
    found = [*seen_from("us", "eu", OK), *seen_from("ap", "eu", BAD)]
    first, *others = with_causes(found, {"eu": DEAD}, commands)
    assert "but us reach it: is the way from here to there open?" in first.detail
    assert first.remedy is None
    assert {one.because for one in others} == {None}, "ap's link is trouble of its own"


def test_a_link_that_a_server_still_counts_is_no_proof_that_another_is_reached():
    first, *others = with_causes(seen_from("us", "eu", BAD, server_link=OK), {"eu": DEAD}, commands)
    assert first.detail.endswith("nor is it reached from us")
    assert [one.because for one in others] == ["eu", "eu", "eu", None]


def test_a_link_that_is_down_between_two_versions_names_them():
    versions = {"us": "nats-server 2.14.6", "eu": "nats-server 2.15.1", "ap": "nats-server 2.14.6"}
    servers = [Finding(name, "bus", "server", OK, text) for name, text in versions.items()]
    links = [*seen_from("us", "eu", BAD), *seen_from("us", "ap", BAD, server_link=BAD)]
    found = [*servers, *links, *seen_from("eu", "us", BAD, server_link=OK)]
    told = [
        (one.region, one.about) for one in with_causes(found, {}, commands) if "2.15" in one.detail
    ]
    assert told == [("eu", "server"), ("us", "eu")], "neither equal versions nor a link that is up"
    [_, _, _, link] = with_causes([*seen_from("us", "eu", BAD)], {}, commands)
    assert link.detail == "", "nobody knows the versions"


def test_a_server_with_known_faults_is_bad_and_a_link_names_its_version_alone():
    text, known = described_version((2, 14, 2))
    assert known and text.startswith("nats-server 2.14.2 has known faults, upgrade it: GHSA-")
    assert described_version((2, 15, 1)) == ("nats-server 2.15.1", False)
    servers = [Finding("us", "bus", "server", BAD, text)]
    servers.append(Finding("eu", "bus", "server", OK, "nats-server 2.15.1"))
    found = with_causes([*servers, *seen_from("us", "eu", BAD)], {}, commands)
    assert "2.14.2" in found[-1].detail and "GHSA" not in found[-1].detail


def test_without_another_region_nothing_is_known_of_the_way():
    [row] = with_causes([], {"eu": DEAD}, commands)
    assert row.detail == "no answer at nats://eu:4222: nobody listens there"


def test_silent_routers_explain_checks_of_routers_and_not_server_links():
    routers = [finding("eu", "router", name, BAD) for name in ("r1", "r2")]
    found = [*routers, *seen_from("us", "eu", BAD)]
    assert [one.because for one in with_causes(found, {}, commands)] == [
        *(None, None),
        *("eu", "eu", None, None),
    ]


def test_while_one_router_sends_a_link_failure_is_unexplained():
    for verdict in (OK, WARNING):
        routers = [finding("eu", "router", "r1", BAD), finding("eu", "router", "r2", verdict)]
        found = [*routers, *seen_from("us", "eu", BAD)]
        assert {one.because for one in with_causes(found, {}, commands)} == {None}


def test_leaks_of_permissions_are_never_explained_away():
    leak = finding("us", "permissions", "answers for eu", BAD)
    assert with_causes([leak], {"eu": DEAD}, commands)[1] == leak


def test_only_silent_programs_and_engines_that_are_down_come_with_a_remedy():
    found = [
        finding("eu", "router", "r1", BAD),
        finding("eu", "heartbeat", "eu-0", BAD),
        finding("eu", "heartbeat", "eu-1", WARNING),
        Finding("eu", "heartbeat", "eu-2", BAD, "starting, 0 requests in it", 82.9, "ms old"),
        Finding("eu", "engine", "eu-3", WARNING, "down, 0 requests in it", 82.9, "ms old"),
        Finding("eu", "engine", "eu-4", BAD, "down, 0 requests in it", 82.9, "ms old"),
        finding("eu", "router", "r2", OK),
        finding("eu", "stream", "r1", BAD),
    ]
    whats = [one.remedy and one.remedy.what for one in with_causes(found, {}, commands)]
    assert whats == [
        *("router r1 of eu", "agent eu-0 of eu", None, None),
        *("engine of eu-3", "engine of eu-4", None, "streams of eu"),
    ]
