from infra import bus
from infra.nats import server
from infra.nats.region_config import to_text
from tests.support.flushed import flushed
from tests.support.ports import free_ports
from tests.support.server_process import ServerProcess

AWKWARD = [
    "$HOME",
    'a "quoted" word',
    "back\\slash \\n \\u0041",
    "tab\there",
    "line\nbreak\r",
    "größe ✓",
    "# no comment",
    "1k",
    "true",
    "",
    "} users: [",
    "bell \x07 \x08 \x0c \x1f end",
]


def test_it_reads_as_a_person_would_write_it():
    tree = {
        "listen": "127.0.0.1:4101",
        "ping_max": 2,
        "leafnodes": {"isolate": True, "remotes": [{"account": "LINK-eu"}], "empty": []},
    }
    assert to_text(tree) == (
        'listen: "127.0.0.1:4101"\n'
        "ping_max: 2\n"
        "leafnodes: {\n"
        '  "isolate": true,\n'
        '  "remotes": [\n'
        "    {\n"
        '      "account": "LINK-eu"\n'
        "    }\n"
        "  ],\n"
        '  "empty": []\n'
        "}\n"
    )


async def test_the_server_reads_every_text_as_it_was(tmp_path):
    """Each awkward text is somebody's password: who logs in with it was understood."""
    (port,) = free_ports(1)
    users = [{"user": f"u{number}", "password": f"p{text}"} for number, text in enumerate(AWKWARD)]
    config = tmp_path / "nats.conf"
    config.write_text(
        to_text({"listen": f"127.0.0.1:{port}", "authorization": {"users": users}}),
        encoding="utf-8",
    )
    process = ServerProcess(server.find(), config, log=tmp_path / "nats.log")
    await process.start()
    try:
        for user in users:
            address = bus.BusAddress(f"nats://127.0.0.1:{port}", user["user"], user["password"])
            client = await bus.connect(address, name="t", inbox_prefix="_INBOX")
            await flushed(client)
            await client.close()
    finally:
        await process.stop()
