"""What an agent's operator may say of residency; other options are tested through the command."""

import pytest
from pydantic import ValidationError

from agents.config import AgentConfig
from agents.core.replica_config import AdapterSource

GIVEN = {
    "region": "eu",
    "replica": "eu-0",
    "engine_kind": "vllm",
    "engine_url": "http://127.0.0.1:8000",
    "nats_url": "nats://127.0.0.1:4222",
}


@pytest.mark.parametrize(
    ("said", "labels"),
    [(None, None), ("none", ()), ("eu", ("eu",)), ("hospital, eu", ("eu", "hospital"))],
)
def test_labels_are_read(said, labels):
    assert AgentConfig(**GIVEN, residency=said).residency == labels


@pytest.mark.parametrize("said", ["", "EU", "eu,", "none,eu."])
def test_labels_that_are_none_are_refused(said):
    with pytest.raises(ValidationError, match="label"):
        AgentConfig(**GIVEN, residency=said)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5557", "tcp://[::1]:5557", "ipc:///run/kv"])
def test_addresses_of_kv_events_are_read(address):
    config = AgentConfig(**GIVEN, kv_events=address, kv_events_replay=address)
    assert config.kv_events == config.kv_events_replay == address


@pytest.mark.parametrize("address", ["", "127.0.0.1:5557", "tcp://*:", "http://host:1", "ipc://"])
def test_other_addresses_of_kv_events_are_refused(address):
    with pytest.raises(ValidationError, match="tcp://host:port"):
        AgentConfig(**GIVEN, kv_events=address)


def test_a_replay_without_events_is_refused():
    with pytest.raises(ValidationError, match="--kv-events too"):
        AgentConfig(**GIVEN, kv_events_replay="tcp://127.0.0.1:5558")


def test_adapters_are_read():
    said = ("sql=/adapters/sql", "law=/x=y,z,base=org/llama")
    config = AgentConfig(**GIVEN, adapters=said, load_adapters=2)
    assert config.adapters == {
        "sql": AdapterSource("/adapters/sql"),
        "law": AdapterSource("/x=y,z", "org/llama"),
    }


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"adapters": ("sql",)}, "NAME=PATH"),
        ({"adapters": ("sql=",)}, "NAME=PATH"),
        ({"adapters": ("=/x",)}, "1 to 256 printable"),
        ({"adapters": ("sql=/x,base=",)}, "1 to 256 printable"),
        ({"adapters": ("sql=/" + "x" * 1024,)}, "NAME=PATH"),
        ({"adapters": ("sql=/x", "sql=/y")}, "once"),
        ({"adapters": tuple(f"a{n}=/x" for n in range(65))}, "at most 64"),
        ({"load_adapters": 0}, "greater than or equal to 1"),
        ({"load_adapters": None}, "--load-adapters, or neither"),
        ({"adapters": ()}, "--adapter and --load-adapters"),
        ({"engine_kind": "llamacpp"}, "vllm and sglang"),
        ({"models": ("m",)}, "leave out --model"),
        ({"engine_kind": "sglang", "adapters": ("a:b=/x",)}, "colon"),
    ],
)
def test_adapters_that_are_none_are_refused(said, problem):
    good = {"adapters": ("sql=/x",), "load_adapters": 2}
    with pytest.raises(ValidationError, match=problem):
        AgentConfig(**(GIVEN | good | said))


def test_as_many_adapters_as_the_limit_are_taken():
    said = tuple(f"a{n}=/x" for n in range(64))
    assert len(AgentConfig(**GIVEN, adapters=said, load_adapters=1).adapters) == 64


@pytest.mark.parametrize(
    ("rank", "kind", "problem"),
    [
        (-1, "vllm", "greater"),
        (1024, "vllm", "less than 1024"),
        (0, "llamacpp", "have ranks"),
        (0, "openai", "have ranks"),
    ],
)
def test_a_rank_that_is_none_is_refused(rank, kind, problem):
    with pytest.raises(ValidationError, match=problem):
        AgentConfig(**(GIVEN | {"engine_kind": kind, "data_parallel_rank": rank}))


LOADS = {"adapters": ("sql=/x",), "load_adapters": 1}
SGLANG = {"engine_kind": "sglang", "kv_transfer": "sglang"}


@pytest.mark.parametrize(
    "said",
    [
        {"role": "both"},
        {"role": "prefill", "kv_transfer": "nixl"},
        {"role": "decode", "kv_transfer": "p2p", "kv_address": "10.0.0.8:21001"},
        {"role": "prefill", "kv_address": "[fd00::1]:8998", **SGLANG},
        {"role": "decode", **SGLANG},
        {"role": "decode", "kv_transfer": "nixl", **LOADS},
    ],
)
def test_parts_in_pairs_are_read(said):
    assert AgentConfig(**GIVEN | said).role == (None if said["role"] == "both" else said["role"])


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"role": "prefill"}, "--kv-transfer"),
        ({"kv_transfer": "nixl"}, "give --role"),
        ({"role": "decode", "kv_transfer": "sglang"}, "engines of kind sglang"),
        ({"role": "decode", "kv_transfer": "p2p"}, "kv_ip and kv_port"),
        ({"role": "prefill", **SGLANG}, "bootstrap server"),
        ({"role": "decode", "kv_address": "h:1", **SGLANG}, "needs none, leave it out"),
        ({"role": "prefill", "kv_transfer": "nixl", "kv_address": "h:1"}, "leave it out"),
        ({"role": "decode", "kv_transfer": "p2p", "kv_address": "no port"}, "pattern"),
        ({"role": "prefill", "kv_transfer": "nixl", **LOADS}, "--adapter: a prefill engine"),
        ({"role": "decode", **SGLANG, **LOADS}, "no whole requests"),
    ],
)
def test_other_parts_in_pairs_are_refused_with_what_to_do(said, problem):
    with pytest.raises(ValidationError, match=problem):
        AgentConfig(**GIVEN | said)
