#!/usr/bin/env bash
# Guess: a server without downloaded models answers /v1/models with an empty list, or with an error.
# Seen (mlx-lm 0.32.2): status 200 and no body at all while the folder of Hugging Face's cache is not
# there: the status is sent before the folder is looked for. With an empty folder the list is empty.
set -euo pipefail
folder=$(mktemp -d)
pid=
cleanup() {
    [ -z "$pid" ] || kill "$pid" 2>/dev/null || true
    wait 2>/dev/null || true
    rm -rf "$folder"
}
trap cleanup EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "mlx-lm[cpu]==0.32.2"
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
HF_HOME=$folder/home HF_HUB_OFFLINE=1 "$folder/env/bin/mlx_lm.server" --host 127.0.0.1 --port "$port" \
    >"$folder/log" 2>&1 &
pid=$!
for _ in $(seq 120); do
    curl --silent --fail --output /dev/null "http://127.0.0.1:$port/health" && break
    sleep 1
done
# answer: the status of /v1/models and its body
answer() { curl --silent --write-out '%{http_code} ' --output "$folder/body" "http://127.0.0.1:$port/v1/models"; cat "$folder/body"; }

echo "mlx-lm 0.32.2"
: >"$folder/body"
without=$(answer)
mkdir -p "$folder/home/hub"
with=$(answer)
echo "without the folder: '$without'"
echo "with it, empty: '$with'"
[ "$without" = "200 " ] && [ "$with" = '200 {"object": "list", "data": []}' ] || { echo changed; exit 1; }
