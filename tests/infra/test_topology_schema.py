import json
import tomllib

import jsonschema
import pytest

from infra.topology import DEFAULT_FILE, TopologyError, parse
from infra.topology_schema import FILE, document, main
from schemas.build import json_text

DEFAULT = DEFAULT_FILE.read_text()
VALIDATOR = jsonschema.Draft202012Validator(document())


def test_what_is_committed_is_what_the_code_says():
    assert FILE.read_text() == json_text(document()), "run make schemas"


def test_writing_writes_it(tmp_path, monkeypatch):
    monkeypatch.setattr("infra.topology_schema.FILE", tmp_path / "x.json")
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
    ],
)
def test_a_bad_file_fails_here_and_in_the_loader(old, new):
    assert old in DEFAULT
    text = DEFAULT.replace(old, new, 1)
    with pytest.raises(TopologyError):
        parse(text, "mesh.toml")
    assert not VALIDATOR.is_valid(tomllib.loads(text))
