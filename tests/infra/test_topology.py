"""Every mistake in a mesh.toml is named by file and key, with what to do."""

import re
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from infra.address import Address
from infra.batch_table import BatchTable
from infra.topology import DEFAULT_FILE, Topology, TopologyError, load, parse

TWO_REGIONS = """
[mesh]
name = "two"
[regions.us]
http = "127.0.0.1:8101"
nats = "127.0.0.1:4101"
leaf = "127.0.0.1:4201"
replicas = 2
[regions.eu]
http = "127.0.0.1:8102"
nats = "127.0.0.1:4102"
leaf = "127.0.0.1:4202"
replicas = ["a", "b"]
routers = ["r1", "r2"]
[[links]]
between = ["us", "eu"]
rtt_ms = 80
"""


def problems_of(text: str) -> list[str]:
    """The lines of the error, without their places."""
    return [re.sub(r"^mesh\.toml:\d+:\d+: ", "mesh.toml: ", line) for line in lines_of(text)]


def lines_of(text: str) -> list[str]:
    with pytest.raises(TopologyError) as caught:
        parse(text, "mesh.toml")
    return str(caught.value).splitlines()


def test_the_packaged_file_is_the_documented_demo():
    topology = load(DEFAULT_FILE)
    assert {name: (r.http.port, r.nats[0].port) for name, r in topology.regions.items()} == {
        "us": (8101, 4101),
        "eu": (8102, 4102),
        "ap": (8103, 4103),
    }
    assert [topology.link(*pair).rtt_s for pair in (("us", "eu"), ("ap", "us"), ("ap", "eu"))] == [
        0.08,
        0.15,
        0.22,
    ]


def test_a_number_of_replicas_means_their_names():
    topology = parse(TWO_REGIONS, "mesh.toml")
    assert topology.region("us").replicas == ("us-0", "us-1")
    assert topology.region("eu").replicas == ("a", "b")


def test_the_first_region_by_name_accepts_the_link_and_the_other_solicits():
    link = parse(TWO_REGIONS, "mesh.toml").link("us", "eu")
    assert (link.acceptor, link.solicitor) == ("eu", "us")


def test_peers_are_all_the_others_by_name():
    assert load(DEFAULT_FILE).peers("eu") == ("ap", "us")


def test_the_error_of_a_wrong_region_lists_those_there_are():
    with pytest.raises(TopologyError, match='no region "uk": there are us, eu'):
        parse(TWO_REGIONS, "mesh.toml").region("uk")


def test_a_single_region_needs_no_link():
    only_us = TWO_REGIONS.split("[regions.eu]")[0]
    assert parse(only_us, "mesh.toml").peers("us") == ()


def test_it_is_frozen():
    topology = parse(TWO_REGIONS, "mesh.toml")
    with pytest.raises(ValidationError):
        topology.regions["us"].nats = Address("127.0.0.1", 1)


# One edit to a good file → the one line that must come of it.
MISTAKES = {
    "endpoint without /v1": (
        'leaf = "127.0.0.1:4201"',
        'leaf = "127.0.0.1:4201"\nendpoint = "us.example.com"',
        'regions.us.endpoint: write the URL that clients use, like "https://us.example.com/v1" '
        "(there is 'us.example.com')",
    ),
    "origin with a path": (
        'leaf = "127.0.0.1:4201"',
        'leaf = "127.0.0.1:4201"\ncors_origins = ["https://app.example.com/"]',
        "regions.us.cors_origins.0: write an origin without a path, like "
        '"https://app.example.com", or "*" (there is \'https://app.example.com/\')',
    ),
    "origins that are no list": (
        'leaf = "127.0.0.1:4201"',
        'leaf = "127.0.0.1:4201"\ncors_origins = "*"',
        'regions.us.cors_origins: write a list of origins, like ["https://app.example.com"], '
        "or [\"*\"] (there is '*')",
    ),
    "a route of the mesh itself": (
        'leaf = "127.0.0.1:4201"',
        'leaf = "127.0.0.1:4201"\nroutes = ["/v1/files/x"]',
        "regions.us.routes: /v1/files/x is a path of the mesh itself: leave it out "
        "(there is ['/v1/files/x'])",
    ),
    "a route that is known": (
        'leaf = "127.0.0.1:4201"',
        'leaf = "127.0.0.1:4201"\nroutes = ["/v1/foo", "/v1/embeddings"]',
        "regions.us.routes: /v1/embeddings is served anyway: leave it out "
        "(there is ['/v1/foo', '/v1/embeddings'])",
    ),
    "a route that is a pattern": (
        'leaf = "127.0.0.1:4201"',
        'leaf = "127.0.0.1:4201"\nroutes = ["/v1/*"]',
        "regions.us.routes: '/v1/*' is no path: write it like /v1/foo, in lower-case letters, "
        "digits, hyphens and underscores (there is ['/v1/*'])",
    ),
    "more routes than may be": (
        'leaf = "127.0.0.1:4201"',
        'leaf = "127.0.0.1:4201"\nroutes = ["/a", "/b", "/c", "/d", "/e"]',
        "regions.us.routes: must have at most 4 (there is ['/a', '/b', '/c', '/d', '/e'])",
    ),
    "location that is a name": (
        'leaf = "127.0.0.1:4201"',
        'leaf = "127.0.0.1:4201"\nlocation = "Dublin"',
        "regions.us.location: write latitude and longitude in degrees, like [38.9, -77.5] "
        "(there is 'Dublin')",
    ),
    "unknown key": (
        'leaf = "127.0.0.1:4201"',
        'leaf = "127.0.0.1:4201"\nreplica = 3',
        'regions.us.replica: unknown key; did you mean "replicas"?',
    ),
    "unknown table": ("[mesh]", "[nuts]\n[mesh]", 'nuts: unknown key; did you mean "nats"?'),
    "missing key": ('http = "127.0.0.1:8101"\n', "", "regions.us.http: missing; add it"),
    "port taken by another region": (
        "127.0.0.1:4102",
        "127.0.0.1:4101",
        "regions.eu.nats: 127.0.0.1:4101 is also regions.us.nats; give each its own port",
    ),
    "port taken by another field": (
        "127.0.0.1:4202",
        "localhost:8101",
        "regions.eu.leaf: 127.0.0.1:8101 is also regions.us.http; give each its own port",
    ),
    "two nats-servers": (
        'nats = "127.0.0.1:4101"',
        'nats = ["127.0.0.1:4101", "127.0.0.1:4104"]',
        "regions.us.nats: write one address, or a list of three "
        "(there is ['127.0.0.1:4101', '127.0.0.1:4104'])",
    ),
    "a list of no nats-server": (
        'nats = "127.0.0.1:4101"',
        "nats = []",
        "regions.us.nats: write one address, or a list of three (there is [])",
    ),
    "a list of one nats-server": (
        'nats = "127.0.0.1:4101"',
        'nats = ["127.0.0.1:4101"]',
        "regions.us.nats: write one address, or a list of three (there is ['127.0.0.1:4101'])",
    ),
    "one nats-server with an address for others of its region": (
        'leaf = "127.0.0.1:4201"',
        'leaf = "127.0.0.1:4201"\ncluster = "127.0.0.1:4301"',
        "regions.us.cluster: 1 addresses, of 1 nats-servers; remove it",
    ),
    "region linked with itself and not with its peer": (
        '["us", "eu"]',
        '["us", "us"]',
        'links.0.between: links "us" with itself; name two regions',
    ),
    "half a pair": (
        '["us", "eu"]',
        '["us"]',
        'links.0.between: write two region names, like ["eu", "us"] (there is [\'us\'])',
    ),
    "bad number": (
        "rtt_ms = 80",
        'rtt_ms = "fast"',
        "links.0.rtt_ms: must be a number (there is 'fast')",
    ),
    "infinite number": (
        "rtt_ms = 80",
        "rtt_ms = inf",
        "links.0.rtt_ms: must be a finite number (there is inf)",
    ),
    "negative number": (
        "rtt_ms = 80",
        "rtt_ms = -1",
        "links.0.rtt_ms: must be at least 0 (there is -1)",
    ),
    "negative replicas": (
        "replicas = 2",
        "replicas = -2",
        "regions.us.replicas: write a number from 0 to 4096, or a list of names (there is -2)",
    ),
    "too many replicas": (
        "replicas = 2",
        "replicas = 4097",
        "regions.us.replicas: write a number from 0 to 4096, or a list of names (there is 4097)",
    ),
    "no router": (
        'routers = ["r1", "r2"]',
        "routers = []",
        'regions.eu.routers: write a list of one name or more, like ["r1"] (there is [])',
    ),
    "a replica twice": (
        '["a", "b"]',
        '["a", "a"]',
        'regions.eu.replicas: "a" is there twice; remove one',
    ),
    "bad replica name": (
        '["a", "b"]',
        '["a", "b.c"]',
        "regions.eu.replicas.1: use 1 to 32 lower-case letters, "
        "digits and inner hyphens (there is 'b.c')",
    ),
    "bad region name": (
        "[regions.us]",
        '[regions."u>s"]',
        "regions.u>s: use 1 to 32 lower-case letters, digits and inner hyphens (there is 'u>s')",
    ),
    "name that ends in a line break": (
        'name = "two"',
        'name = "two\\n"',
        "mesh.name: use 1 to 32 lower-case letters, digits and inner hyphens (there is 'two\\n')",
    ),
    "name that is no text": (
        'name = "two"',
        "name = 2",
        "mesh.name: must be a text (there is 2)",
    ),
    "bad address": (
        "127.0.0.1:4101",
        "127.0.0.1:99999",
        'regions.us.nats: the port of "127.0.0.1:99999" must be a number from 1 to 65535 '
        "(there is '127.0.0.1:99999')",
    ),
    "a backlog smaller than one message": (
        "[mesh]",
        "[nats]\nmax_payload_mib = 9\nmax_pending_mib = 8\n[mesh]",
        "nats: max_pending_mib must be at least max_payload_mib",
    ),
    "a batch runner named like a router": (
        'routers = ["r1", "r2"]',
        'routers = ["r1", "r2"]\nbatch_runners = ["r2"]',
        'regions.eu.batch_runners: "r2" is a router\'s name; rename it',
    ),
    "more routers and batch runners than peers accept": (
        'routers = ["r1", "r2"]',
        f'routers = ["r1", "r2"]\nbatch_runners = {[f"b{n}" for n in range(15)]}',
        "regions.eu.workers: 17 processes of all routers and batch runners; at most 16, as peers "
        "accept no more",
    ),
    "a disk too small for batch jobs": (
        'routers = ["r1", "r2"]\n',
        'routers = ["r1", "r2"]\nbatch_runners = ["b"]\n[nats]\njetstream_disk_mib = 8403\n',
        "nats.jetstream_disk_mib: 8403 does not hold what [batch] may take, with 84 MiB for "
        "records and 64 for the region's state; write 8404 or more, leave it out, or make "
        "files_mib, results_mib or lines_mib smaller",
    ),
    "a store smaller than one file": (
        "[mesh]",
        "[batch]\nfiles_mib = 100\n[mesh]",
        "batch: files_mib (100) must be at least 640 for files of file_mib_max (512), as 20% of it "
        "is for outputs of jobs",
    ),
    "a store too small for anything": (
        "[mesh]",
        "[batch]\nlines_mib = 15\n[mesh]",
        "batch.lines_mib: must be at least 16 (there is 15)",
    ),
    "a profile without a name": (
        'routers = ["r1", "r2"]',
        'routers = ["r1", "r2"]\nprofile = ""',
        "regions.eu.profile: write the file that mesh-agent profile wrote, like "
        "\"us.profile.json\" (there is '')",
    ),
    "a price below nothing": (
        'routers = ["r1", "r2"]',
        'routers = ["r1", "r2"]\ngpu_hour_price = -1',
        "regions.eu.gpu_hour_price: must be at least 0 (there is -1)",
    ),
}


def test_the_packaged_file_shows_every_limit_of_batch_jobs_with_its_default():
    commented = DEFAULT_FILE.read_text().partition("# [batch]\n")[2].partition("\n\n")[0]
    shown = tomllib.loads("\n".join(line.removeprefix("# ") for line in commented.splitlines()))
    assert shown == BatchTable().model_dump()


def test_what_batch_jobs_may_take_is_added_to_the_disk_where_it_is_not_written():
    runners = TWO_REGIONS.replace('routers = ["r1", "r2"]', 'batch_runners = ["b"]', 1)
    assert parse(TWO_REGIONS, "t").jetstream_disk_mib("eu") == 1024
    mesh = parse(runners, "t")
    assert (mesh.jetstream_disk_mib("us"), mesh.jetstream_disk_mib("eu")) == (1024, 1024 + 8340)
    enough = parse(runners + "\n[nats]\njetstream_disk_mib = 8404\n", "t")
    assert enough.jetstream_disk_mib("us") == enough.jetstream_disk_mib("eu") == 8404


@pytest.mark.parametrize(("old", "new", "line"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_line_with_its_correction(old: str, new: str, line: str):
    assert old in TWO_REGIONS
    assert f"mesh.toml: {line}" in problems_of(TWO_REGIONS.replace(old, new, 1))


def test_a_link_to_an_unknown_region_names_the_nearest():
    lines = problems_of(TWO_REGIONS.replace('["us", "eu"]', '["us", "eur"]'))
    assert 'mesh.toml: links.0.between: no region "eur"; did you mean "eu"?' in lines


def test_an_unlinked_region_gives_the_table_to_add():
    assert problems_of(TWO_REGIONS.split("[[links]]")[0]) == [
        'mesh.toml: links: "eu" and "us" are not linked; add [[links]] with '
        'between = ["eu", "us"] and its rtt_ms (every pair needs one)'
    ]


def test_a_second_link_of_a_pair_is_a_mistake_in_either_order():
    text = TWO_REGIONS + '[[links]]\nbetween = ["eu", "us"]\nrtt_ms = 1\n'
    assert problems_of(text) == ["mesh.toml: links.1: the same pair as links.0; remove one"]


def test_a_bad_region_name_hides_what_is_wrong_only_because_of_it():
    text = TWO_REGIONS.split("[[links]]")[0].replace("[regions.us]", "[regions.US]")
    assert len(problems_of(text)) == 1


def test_all_mistakes_are_reported_at_once():
    text = TWO_REGIONS.replace("rtt_ms = 80", "rtt_ms = -1").replace('"two"', '"T"')
    assert [line.split(": ")[1] for line in problems_of(text)] == ["mesh.name", "links.0.rtt_ms"]


def test_the_error_of_broken_toml_names_the_place():
    assert lines_of("[mesh]\nname = two\n") == [
        'mesh.toml:2:8: not TOML: Invalid value; a text needs "quotes", a number none'
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[mesh]\nname = 'a'\nname = 'b'\n", "3:11: .* the key is there twice; remove one"),
        ("[mesh]\n[mesh]\n", "2:6: .* the table is there twice; join them"),
        ("[mesh]\nname: 'a'\n", "2:5: .* write key = value; comments begin with #"),
        ("a = " + "[" * 100_000, "not TOML: brackets too deep; correct the file there"),
        ("a = " + "9" * 5000, "not TOML: Exceeds the limit .*; correct the file there"),
        ("a = 1\nb = [", "2: not TOML: Invalid value; the text ends too early"),
    ],
)
def test_what_is_no_toml_is_told_with_what_to_write(text: str, said: str):
    (line,) = lines_of(text)
    assert re.match(rf"mesh\.toml: ?{said}", line), line


MANY_MISTAKES = """\
[mesh]
name = "Two Regions"
[regions.us]
http = "127.0.0.1:8101"
nats = "127.0.0.1"
leaf = "127.0.0.1:8101"
replica = 2
residency = ["us"]
confined_to = [
  "us",
  "eu",
]
[regions.eu]
http = "127.0.0.1:8102"
nats = "127.0.0.1:4102"
leaf = "127.0.0.1:4202"
replicas = ["a", "a"]
routing = { polcy = "mesh" }
[[links]]
between = ["us", "eur"]
rtt_ms = "80"
[tenants.acme]
key_sha256 = ["secret"]
residency = ["ue"]
[routing]
policy_by_priority = { urgent = "mesh" }
"""


def test_all_mistakes_are_told_at_once_each_with_its_place():
    """Also those between tables while values are wrong."""
    assert lines_of(MANY_MISTAKES) == [
        "mesh.toml:2:1: mesh.name: use 1 to 32 lower-case letters, digits and inner hyphens (there "
        "is 'Two Regions')",
        "mesh.toml:3:1: regions.us.replicas: missing; add it",
        'mesh.toml:5:1: regions.us.nats: write an address as "host:port", got "127.0.0.1" (there '
        "is '127.0.0.1')",
        "mesh.toml:6:1: regions.us.leaf: 127.0.0.1:8101 is also regions.us.http; give each its own "
        "port",
        'mesh.toml:7:1: regions.us.replica: unknown key; did you mean "replicas"?',
        'mesh.toml:9:1: regions.us.confined_to: the region itself does not carry "eu"; add it to '
        "its residency",
        'mesh.toml:17:1: regions.eu.replicas: "a" is there twice; remove one',
        'mesh.toml:18:13: regions.eu.routing.polcy: unknown key; did you mean "policy"?',
        'mesh.toml:19:1: links: "eu" and "us" are not linked; add [[links]] with between = '
        '["eu", "us"] and its rtt_ms (every pair needs one)',
        'mesh.toml:20:1: links.0.between: no region "eur"; did you mean "eu"?',
        "mesh.toml:21:1: links.0.rtt_ms: must be a number (there is '80')",
        "mesh.toml:23:15: tenants.acme.key_sha256.0: write the key's SHA-256 in 64 lower-case hex "
        "digits, never the key",
        'mesh.toml:24:1: tenants.acme.residency: no region carries "ue"; there are us',
        "mesh.toml:26:24: routing.policy_by_priority.urgent: must be 'high', 'normal' or 'low' "
        "(there is 'urgent')",
    ]


def test_the_error_of_a_missing_file_names_the_correction(tmp_path):
    with pytest.raises(TopologyError, match="No such file") as caught:
        load(tmp_path / "nowhere.toml")
    assert str(DEFAULT_FILE) in str(caught.value)


def test_a_file_that_is_no_text_is_a_clear_error(tmp_path):
    path = tmp_path / "mesh.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(TopologyError, match="not UTF-8"):
        load(path)


LINES = TWO_REGIONS.splitlines()


@given(
    st.lists(
        st.tuples(
            st.integers(0, len(LINES) - 1),
            st.sampled_from(
                ["", "replicas = 2", "[regions.eu]", "[[links]]", "nats = 5", "links=3"]
            )
            | st.text(max_size=30),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_any_edit_gives_a_topology_or_a_topology_error(edits):
    lines = list(LINES)
    for number, line in edits:
        lines[number] = line
    try:
        topology = parse("\n".join(lines), "mesh.toml")
    except TopologyError as error:
        lines = str(error).splitlines()
        assert lines and all(re.match(r"mesh\.toml(:\d+(:\d+)?)?: ", line) for line in lines)
    else:
        assert isinstance(topology, Topology)


def test_three_nats_servers_have_an_address_of_each_kind():
    """All that are missing are named at once; one server is as before."""
    text = DEFAULT_FILE.read_text().replace(
        'nats = "127.0.0.1:4101"', 'nats = ["a:4101", "b:4101", "c:4101"]'
    )
    with pytest.raises(TopologyError) as refused:
        parse(text, "mesh.toml")
    lines = str(refused.value).splitlines()
    assert [line.split(": ", 1)[1] for line in lines] == [
        "regions.us.cluster: 0 addresses, of 3 nats-servers; write 3, one for each address of nats",
        "regions.us.leaf: 1 addresses, of 3 nats-servers; write 3, one for each address of nats",
    ]
    good = text.replace(
        'leaf = "127.0.0.1:4201"',
        'leaf = ["a:4201", "b:4201", "c:4201"]\ncluster = ["a:6222", "b:6222", "c:6222"]',
    )
    mesh = parse(good, "mesh.toml")
    assert mesh.regions["us"].bus_url == "nats://a:4101,nats://b:4101,nats://c:4101"
    assert [str(each.cluster) for each in mesh.regions["us"].servers] == [
        "a:6222",
        "b:6222",
        "c:6222",
    ]
    assert mesh.regions["eu"].bus_url == "nats://127.0.0.1:4102"
