import json
import tomllib

import jsonschema
import pytest

from docs.documents import json_text
from docs.topology_schema import FILE, document, main
from infra.topology import DEFAULT_FILE, TopologyError, parse

DEFAULT = DEFAULT_FILE.read_text()
VALIDATOR = jsonschema.Draft202012Validator(document())


def test_the_committed_schema_is_what_the_code_writes():
    assert FILE.read_text() == json_text(document()), "run make schemas"


def test_writing_writes_it(tmp_path, monkeypatch):
    monkeypatch.setattr("docs.topology_schema.FILE", tmp_path / "x.json")
    main()
    assert json.loads((tmp_path / "x.json").read_text()) == document()


def test_it_is_a_json_schema():
    jsonschema.Draft202012Validator.check_schema(document())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("replicas = 4 ", 'replicas = ["us-a", "us-b"] '),
        ("replicas = 4 ", "replicas = 0 "),
        ("rtt_ms = 80", "rtt_ms = 80.5"),
        ("[regions.us]", "[nats]\nmax_payload_mib = 16\n\n[regions.us]"),
        ("[regions.us]", '[routing]\npolicy = "mesh"\npushing = "outstanding:8"\n\n[regions.us]'),
        ("[[links]]", '[regions.us.routing]\ntopology = "region-local"\n\n[[links]]'),
        ("[[links]]", '[regions.us.routing.policy_by_priority]\nlow = "least-load"\n\n[[links]]'),
    ],
)
def test_a_good_file_passes_here_and_in_the_loader(old, new):
    text = DEFAULT.replace(old, new, 1)
    parse(text, "mesh.toml")
    assert [error.message for error in VALIDATOR.iter_errors(tomllib.loads(text))] == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("replicas = 4 ", "replicas = -1 "),
        ("replicas = 4 ", "replicas = 5000 "),
        ("replicas = 4 ", 'replicas = ["US"] '),
        ("replicas = 4 ", 'replicas = ["a", "a"] '),
        ('"127.0.0.1:8101"', "8101"),
        ('"127.0.0.1:8101"', '"127.0.0.1"'),
        ('routers = ["r1"]', "routers = []"),
        ("[regions.us]", "[regions.US]"),
        ("rtt_ms = 80", "rtt_ms = -80"),
        ("rtt_ms = 80", "rtt = 80"),
        ('between = ["us", "eu"]', 'between = ["us"]'),
        ('name = "demo"', 'name = "a b"'),
        ("[[links]]", '[routing]\npolcy = "mesh"\n\n[[links]]'),
        ("[[links]]", '[routing]\npolicy = ""\n\n[[links]]'),
        ("[[links]]", '[routing]\npushing = "outstanding:"\n\n[[links]]'),
        ("[[links]]", '[routing]\ntopology = "central:us"\n\n[[links]]'),
        ("[[links]]", '[routing.policy_by_priority]\nhgh = "mesh"\n\n[[links]]'),
    ],
)
def test_a_bad_file_fails_here_and_in_the_loader(old, new):
    assert old in DEFAULT
    text = DEFAULT.replace(old, new, 1)
    with pytest.raises(TopologyError):
        parse(text, "mesh.toml")
    assert not VALIDATOR.is_valid(tomllib.loads(text))
