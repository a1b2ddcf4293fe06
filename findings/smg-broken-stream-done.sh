#!/usr/bin/env bash
# Guess: when a worker's connection breaks inside a stream, the router in front breaks its client's
# connection too, or ends the stream with an error that stands last.
# Seen (smg 1.13.0): the client gets an event `{"error": {..., "type": "stream_error"}}`, then
# `data: [DONE]`, and the end of a whole chunked body. To whoever waits for [DONE], or reads
# choices alone, an answer of eight words instead of twenty is whole.
set -euo pipefail
folder=$(mktemp -d)
pids=()
cleanup() {
    [ "${#pids[@]}" = 0 ] || kill -TERM "${pids[@]}" 2>/dev/null || true
    wait 2>/dev/null || true
    rm -rf "$folder"
}
trap cleanup EXIT
cat >"$folder/worker.py" <<'PY'
"""An engine whose connection closes after eight words of each stream."""
import http.server
import json
import sys

MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "me"}]}


class Engine(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        body = json.dumps(MODELS if self.path == "/v1/models" else {"model_path": "m"}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for word in range(8):
            choice = {"index": 0, "delta": {"content": f"word{word} "}, "finish_reason": None}
            event = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
            data = b"data: %s\n\n" % json.dumps(event).encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.close_connection = True  # the last chunk is missing

    def log_message(self, *_):
        pass


http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Engine).serve_forever()
PY
free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
engine=$(free_port) port=$(free_port)
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet smg==1.13.0
python3 "$folder/worker.py" "$engine" 2>/dev/null &
pids+=($!)
"$folder/env/bin/smg" launch --host 127.0.0.1 --port "$port" --log-level error --prometheus-port "$(free_port)" \
    --worker-urls "http://127.0.0.1:$engine" >"$folder/log" 2>&1 &
pids+=($!)
ask() { # URL: its answer, and whether the body was whole
    curl --silent --no-buffer --max-time 10 -H 'content-type: application/json' \
        -d '{"model": "m", "stream": true, "messages": [{"role": "user", "content": "a"}]}' \
        "$1/v1/chat/completions" >"$folder/answer" && whole=yes || whole="no (curl $?)"
}
for _ in $(seq 60); do
    ask "http://127.0.0.1:$port"
    grep -q word7 "$folder/answer" && break
    sleep 1
done
"$folder/env/bin/pip" list 2>/dev/null | grep '^smg'
echo "through smg: body whole: $whole; words: $(grep -c word "$folder/answer"); then:"
tail -n 4 "$folder/answer"
[ "$whole" = yes ] && grep -q '"type":"stream_error"' "$folder/answer" || { echo "changed"; exit 1; }
[ "$(grep . "$folder/answer" | tail -n 1)" = "data: [DONE]" ] || { echo "changed: no [DONE]"; exit 1; }
ask "http://127.0.0.1:$engine"
echo "from the engine: body whole: $whole"
[ "$whole" = "no (curl 18)" ]
