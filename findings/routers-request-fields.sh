#!/usr/bin/env bash
# Guess: a router in front of engines hands a request's body on as it came, so what an engine's API
# takes beyond OpenAI's goes through it.
# Seen: each of these reads the body into its own types and writes it anew. sglang-router 0.3.2 answers
# 200 and leaves out the fields that it does not know: vLLM's `cache_salt` (prompts share their cached
# prefix again), `structured_outputs` (the answer is bound to nothing), `priority`, and an assistant's
# `reasoning`. vllm-router 0.1.17 and smg 1.13.0 keep them, but smg names `reasoning` by its older name
# `reasoning_content`. The first two add SGLang's own fields to every chat, of vLLM's as well, and all
# three leave out an assistant's `"content": null`.
set -euo pipefail
folder=$(mktemp -d)
pids=()
cleanup() {
    [ "${#pids[@]}" = 0 ] || kill -KILL "${pids[@]}" 2>/dev/null || true
    wait 2>/dev/null || true
    rm -rf "$folder"
}
trap cleanup EXIT
cat >"$folder/worker.py" <<'PY'
"""An engine that keeps the last chat's body in a file, and answers it with one word."""
import http.server
import json
import sys

PAGES = {
    "/v1/models": {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "me"}]},
    "/get_model_info": {"model_path": "m", "is_generation": True},
    "/model_info": {"model_path": "m", "is_generation": True},
    "/get_server_info": {"model_path": "m", "served_model_name": "m", "tp_size": 1, "dp_size": 1},
    "/server_info": {"model_path": "m", "served_model_name": "m", "tp_size": 1, "dp_size": 1},
    "/health": {},
}
CHOICE = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
ANSWER = {"id": "a", "object": "chat.completion", "created": 1, "model": "m", "choices": [CHOICE], "usage": USAGE}


class Engine(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        page = PAGES.get(self.path)
        self.answer(200 if page is not None else 404, page)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path != "/v1/chat/completions":
            self.answer(404, None)
            return
        with open(sys.argv[2], "wb") as file:
            file.write(body)
        self.answer(200, ANSWER)

    def answer(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Engine).serve_forever()
PY
cat >"$folder/sent.json" <<'JSON'
{"model": "m", "cache_salt": "tenant-1", "structured_outputs": {"regex": "yes|no"}, "priority": 3,
 "messages": [{"role": "user", "content": "Is it?"},
  {"role": "assistant", "content": "Yes.", "reasoning": "It seems so."},
  {"role": "assistant", "content": null, "tool_calls":
   [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
  {"role": "tool", "tool_call_id": "c1", "content": "1"}, {"role": "user", "content": "Sure?"}]}
JSON
cat >"$folder/compare.py" <<'PY'
import json
import sys

sent, came = (json.load(open(path)) for path in sys.argv[1:3])
of = lambda body: {*body, *(f"messages[{n}].{key}" for n, turn in enumerate(body["messages"]) for key in turn)}
print("  left out:", ", ".join(sorted(of(sent) - of(came))))
print("  added:", ", ".join(sorted(of(came) - of(sent))))
PY
free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
# through NAME VERSION COMMAND…: what of the chat reaches a worker behind it
through() {
    local name=$1 version=$2 engine port came=$folder/$1.json
    engine=$(free_port) port=$(free_port)
    python3 -m venv "$folder/$name"
    "$folder/$name/bin/pip" install --quiet "$name==$version"
    python3 "$folder/worker.py" "$engine" "$came" 2>/dev/null &
    pids+=($!)
    "$folder/$name/bin/${@:3:1}" "${@:4}" --host 127.0.0.1 --port "$port" --log-level error \
        --prometheus-port "$(free_port)" --worker-urls "http://127.0.0.1:$engine" >"$folder/log" 2>&1 &
    pids+=($!)
    for _ in $(seq 60); do
        status=$(curl --silent --max-time 10 --output /dev/null --write-out '%{http_code}' -d "@$folder/sent.json" \
            -H 'content-type: application/json' "http://127.0.0.1:$port/v1/chat/completions" || true)
        [ "$status" = 200 ] && break
        sleep 1
    done
    echo "$name $version: $status"
    python3 "$folder/compare.py" "$folder/sent.json" "$came" | tee "$folder/$name.txt"
}
through sglang-router 0.3.2 sglang-router launch
through vllm-router 0.1.17 vllm-router
through smg 1.13.0 smg launch
fields() { sed -n "s/^  $2: //p" "$folder/$1.txt"; }
expect() { [ "$3" = "$(fields "$1" "$2")" ] || { echo "changed: $1, $2"; exit 1; }; }
of_sglang="continue_final_message, ignore_eos"
expect sglang-router "left out" \
    "cache_salt, messages[1].reasoning, messages[2].content, priority, structured_outputs"
expect vllm-router "left out" "messages[2].content"
expect smg "left out" "messages[1].reasoning, messages[2].content"
[[ "$(fields sglang-router added)" == "$of_sglang"* ]] || { echo "changed: what sglang-router adds"; exit 1; }
[[ "$(fields vllm-router added)" == "$of_sglang"* ]] || { echo "changed: what vllm-router adds"; exit 1; }
expect smg added "logprobs, messages[1].reasoning_content, stream"
