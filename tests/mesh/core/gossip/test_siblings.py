"""Routers of one region: what one places the others know, and who starts asks one of them."""

import pytest

from mesh.core.gossip.publisher import AGAIN_S
from mesh.core.gossip.siblings import ALONE_S
from mesh.core.gossip.stream_receiver import GONE_S
from mesh.core.model import effects as fx
from schemas.gossip import DELTA_BLOCKS_MAX, EVERYTHING, SIBLINGS, TrieAsk
from tests.mesh.core.gossip.net import HEAL_S, SETTLE_S, Net, placed

PATH = tuple(range(30))


@pytest.fixture
def net():
    """us/r1, us/r2, and three others, all warm."""
    net = Net(1, nodes=5, trie_blocks_max=16_384)
    net.rest(SETTLE_S)
    return net


def us(net):
    return [node for node in net.nodes if node.region == "us"]


def is_warm(node):
    return node.gossip.siblings.sync.warm_at is not None


def inside_bytes(net):
    return net.sent_bytes["us", "us"]


def test_what_one_places_the_other_knows_at_once_and_on_which_replica(net):
    one, other = us(net)
    one.index.insert("us-1", PATH, net.now)
    net.step()
    assert placed(other) == {"us-1": set(PATH)}
    assert other.index.depths(PATH, ("us-0", "us-1")) == {"us-1": len(PATH)}


def test_a_prompt_that_is_used_again_stays_young_for_both(net):
    one, other = us(net)
    for node in (one, other):
        node.index.bound("us-0", 40)
    one.index.insert("us-0", PATH, net.now)
    net.rest(AGAIN_S)
    one.index.insert("us-0", tuple(range(100, 110)), net.now)
    net.rest(0.1)
    one.index.insert("us-0", PATH, net.now)
    net.rest(0.1)
    other.index.insert("us-0", tuple(range(200, 210)), net.now)
    net.rest(0.1)
    assert placed(one) == placed(other) == {"us-0": {*PATH, *range(200, 210)}}


def test_a_burst_of_one_prompt_is_published_once(net):
    one, _ = us(net)
    one.index.insert("us-0", PATH, net.now)
    net.step()
    before = inside_bytes(net)
    for _ in range(50):
        one.index.insert("us-0", PATH, net.now)
    net.step()
    assert inside_bytes(net) - before < 1000


def test_a_path_longer_than_a_message_keeps_its_order(net):
    one, other = us(net)
    long = tuple(range(DELTA_BLOCKS_MAX + 500))
    one.index.insert("us-0", long, net.now)
    net.step()
    order = [block for block, _ in other.index.held("us-0")]
    assert order == list(reversed(long))


def test_what_an_engine_has_evicted_goes_from_every_index(net):
    one, other = us(net)
    one.index.insert("us-0", PATH, net.now)
    at = net.now
    net.rest(10.0)
    one.index.insert("us-0", (7, 8), net.now)
    net.rest(1.0)
    one.index.forget_until("us-0", at)
    net.step()
    assert placed(one) == placed(other) == {"us-0": {7, 8}}


def test_what_was_never_computed_goes_from_every_index(net):
    one, other = us(net)
    one.index.insert("us-0", PATH, net.now)
    net.step()
    at = one.index.held("us-0")[0][1]
    one.index.retract("us-0", PATH[10:], at)
    net.step()
    assert placed(one) == placed(other) == {"us-0": set(PATH[:10])}


def test_a_router_that_starts_takes_everything_from_a_warm_one(net):
    one, other = us(net)
    one.index.insert("us-0", PATH, net.now)
    other.index.insert("us-1", (7, 8), net.now)
    net.rest(1.0)
    before = other.gossip.siblings.snapshots
    one.restart()
    assert not is_warm(one)
    net.rest(1.0)
    assert is_warm(one) and one.gossip.siblings.sync.source == "r2"
    assert placed(one) == {"us-0": set(PATH), "us-1": {7, 8}}
    assert other.gossip.siblings.snapshots == before + 1


def test_who_starts_alone_is_warm_after_a_while():
    net = Net(1, nodes=3)
    net.rest(ALONE_S - 0.2)
    assert not any(map(is_warm, net.nodes))
    net.rest(0.4)
    assert all(map(is_warm, net.nodes))
    assert net.nodes[0].gossip.siblings.sync.source is None


def test_all_that_start_together_are_warm_and_know_each_others_first_placements():
    net = Net(1, nodes=5)
    one, other = us(net)
    one.index.insert("us-0", PATH, net.now)
    other.index.insert("us-1", (7, 8), net.now)
    net.rest(SETTLE_S + HEAL_S)
    assert placed(one) == placed(other) == {"us-0": set(PATH), "us-1": {7, 8}}


def test_a_late_answer_does_not_bring_back_what_a_replica_has_lost_since(net):
    one, other = us(net)
    one.index.insert("us-0", PATH, net.now)
    net.rest(1.0)
    other.restart()
    while not any(isinstance(effect, fx.AskTrie) for effect in other.effects):
        net.now += 0.05
        for node in us(net):
            node.index.expire(net.now)
            node.gossip.tick(net.now)
            if node is one:
                net._perform(one)
                net._deliver_nearby()
    net._perform(other)
    net._deliver_nearby()  # the answer is made now and sent at the next tick
    for node in (one, other):
        node.index.expire(net.now + 0.01)
        node.index.forget("us-0")
    net.rest(1.0)
    assert placed(one) == placed(other) == {}


def test_without_a_budget_nothing_is_published_and_all_are_warm():
    net = Net(1, nodes=5, siblings_bytes_per_s=0)
    one, other = us(net)
    one.index.insert("us-0", PATH, net.now)
    net.rest(1.0)
    assert is_warm(one) and placed(other) == {}


SECRET = tuple(range(1000, 1030))


@pytest.fixture
def secret(net):
    """Both routers of us know a path that peers may not know, and one that they may, by one."""
    one, _ = us(net)
    net.place(one, "us-0", SECRET, is_secret=True)
    net.place(one, "us-1", PATH)
    net.rest(1.0)
    return net


def told(net):
    """All that any other region has received."""
    return {
        block
        for node in net.nodes
        if node.region != "us"
        for origin in node.gossip.remote.origins
        if origin.region == "us"
        for block in node.gossip.remote.blocks(origin)
    }


def test_a_secret_is_for_siblings_and_not_for_peers(secret):
    one, other = us(secret)
    assert placed(one) == placed(other) == {"us-0": set(SECRET), "us-1": set(PATH)}
    assert told(secret) == set(PATH)


def test_survivors_of_a_sibling_do_not_publish_its_secrets(secret):
    one, other = us(secret)
    one.is_away = True
    secret.rest(GONE_S + 2.0)
    assert placed(other) == {"us-0": set(SECRET), "us-1": set(PATH)}
    assert set(other.gossip.outgoing.published) == told(secret) == set(PATH)
    assert secret.leaks == []


def test_a_siblings_index_is_not_published_to_peers(secret):
    one, other = us(secret)
    for node in (one, other):
        node.restart()
        secret.rest(SETTLE_S)
        assert node.gossip.siblings.sync.source is not None
    assert placed(one) == placed(other) == {"us-0": set(SECRET), "us-1": set(PATH)}
    assert told(secret) == set(PATH)
    assert secret.leaks == []


def test_a_secret_prefix_is_published_once_an_open_prompt_has_it(secret):
    _, other = us(secret)
    secret.place(other, "us-1", (*SECRET[:10], 7))
    secret.rest(1.0)
    assert told(secret) == {*PATH, *SECRET[:10], 7}


def test_a_peer_that_asks_as_siblings_do_gets_no_answer(secret):
    """Its link would not carry the request in our name; in its own, there is no answer."""
    one, other = us(secret)
    [asker] = [node for node in secret.nodes if node.origin == ("eu", "r1")]
    for after in (EVERYTHING, 0):
        ask = TrieAsk(one.origin.router, one.epoch, after, SIBLINGS, other.origin.router)
        one.gossip.asked(ask, asker.region, f"{asker.origin}/{SIBLINGS}", secret.now)
        secret.rest(0.2)
        assert secret.leaks == []
        one.gossip.asked(ask, one.region, f"{asker.origin}/{SIBLINGS}", secret.now)
        secret.rest(0.2)
        assert secret.leaks != [], "it would have been seen"
        secret.leaks.clear()
