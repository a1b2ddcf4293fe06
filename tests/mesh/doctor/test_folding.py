"""What follows from a region's own trouble says so; nothing else is explained away."""

from mesh.doctor.findings import Finding, Remedy, Verdict, is_healthy
from mesh.doctor.folding import folded
from mesh.doctor.reach import Silence

OK, WARNING, BAD, UNKNOWN = Verdict
DEAD = Silence("nats://eu:4222", "nobody listens there", listens=False)


class Hands:
    def server(self, region, silence):
        return Remedy(f"{region} at {silence.url}", "true")

    def part(self, kind, region, name):
        return Remedy(f"{kind} {name} of {region}", "true")

    def stream(self, region, name):
        return Remedy(f"stream {name} of {region}", "true")


by_hand = Hands()


def finding(region, check, about, verdict, peer=None):
    return Finding(region, check, about, verdict, "", peer=peer)


def seen_from(region, peer, verdict, *, server_link=BAD):
    return [
        finding(region, "link", peer, verdict, peer),
        finding(region, "round trip", peer, verdict, peer),
        finding(region, "lease", f"write for {peer}", UNKNOWN if verdict is BAD else OK, peer),
        finding(region, "server link", peer, server_link, peer),
    ]


def test_links_to_a_dead_server_follow_from_it_whoever_looks():
    found = [*seen_from("us", "eu", BAD), *seen_from("ap", "eu", BAD), *seen_from("us", "ap", OK)]
    first, *others = folded(found, {"eu": DEAD}, by_hand)
    assert (first.region, first.check, first.about, first.verdict) == ("eu", "bus", "server", BAD)
    assert first.remedy == Remedy("eu at nats://eu:4222", "true") and first.because is None
    assert first.detail.endswith("nobody listens there; nor is it reached from us, ap")
    assert [one.because for one in others] == ["eu"] * 8 + [None] * 4
    assert [one.verdict for one in others] == [one.verdict for one in found]
    assert not is_healthy([first, *others])


def test_of_a_server_that_others_reach_nothing_follows_and_nothing_is_to_be_started():
    found = [*seen_from("us", "eu", OK), *seen_from("ap", "eu", BAD)]
    first, *others = folded(found, {"eu": DEAD}, by_hand)
    assert "but us reach it: is the way from here to there open?" in first.detail
    assert first.remedy is None
    assert {one.because for one in others} == {None}, "ap's link is trouble of its own"


def test_a_link_that_a_server_still_counts_is_no_proof_that_another_is_reached():
    first, *others = folded(seen_from("us", "eu", BAD, server_link=OK), {"eu": DEAD}, by_hand)
    assert first.detail.endswith("nor is it reached from us")
    assert [one.because for one in others] == ["eu", "eu", "eu", None]


def test_nobody_who_looks_says_nothing_of_others():
    [row] = folded([], {"eu": DEAD}, by_hand)
    assert row.detail == "no answer at nats://eu:4222: nobody listens there"


def test_silent_routers_explain_what_routers_carry_and_not_the_link_of_servers():
    routers = [finding("eu", "router", name, BAD) for name in ("r1", "r2")]
    found = [*routers, *seen_from("us", "eu", BAD)]
    assert [one.because for one in folded(found, {}, by_hand)] == [
        *(None, None),
        *("eu", "eu", None, None),
    ]


def test_while_one_router_speaks_a_link_is_trouble_of_its_own():
    for verdict in (OK, WARNING):
        routers = [finding("eu", "router", "r1", BAD), finding("eu", "router", "r2", verdict)]
        found = [*routers, *seen_from("us", "eu", BAD)]
        assert {one.because for one in folded(found, {}, by_hand)} == {None}


def test_leaks_of_permissions_are_never_explained_away():
    leak = finding("us", "permissions", "answers for eu", BAD)
    assert folded([leak], {"eu": DEAD}, by_hand)[1] == leak


def test_who_is_not_heard_comes_with_what_to_do_and_nobody_else():
    found = [
        finding("eu", "router", "r1", BAD),
        finding("eu", "heartbeat", "eu-0", BAD),
        finding("eu", "heartbeat", "eu-1", WARNING),
        finding("eu", "router", "r2", OK),
        finding("eu", "stream", "r1", BAD),
    ]
    whats = [one.remedy and one.remedy.what for one in folded(found, {}, by_hand)]
    assert whats == ["router r1 of eu", "agent eu-0 of eu", None, None, "stream r1 of eu"]
