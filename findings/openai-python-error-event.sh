#!/usr/bin/env bash
# Guess: a Responses stream that ends with the API's `error` event raises in OpenAI's Python SDK.
# Seen (openai 3.57.0): iterating `responses.create(stream=True)` hands the documented `error` event
# and `response.failed` over like any other event; only an event with a key `error` at its top, which
# the API does not document, raises APIError. `response.failed` of another response id passes, too.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "openai==3.57.0"
cat >"$folder/show.py" <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai

RESPONSE = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m", "output": [],
            "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "status": "in_progress"}
CREATED = {"type": "response.created", "sequence_number": 0, "response": RESPONSE}


def failed(response_id):
    error = {"code": "server_error", "message": "the engine ended"}
    response = {**RESPONSE, "id": response_id, "status": "failed", "error": error}
    return {"type": "response.failed", "sequence_number": 1, "response": response}


ERROR = {"type": "error", "sequence_number": 1, "code": "server_error",
         "message": "the engine ended", "param": None}
ENDINGS = {
    "response.failed": failed("resp_1"),
    "response.failed of another id": failed("resp_2"),
    "error": ERROR,
    "error with an object": {**ERROR, "error": {"message": "the engine ended"}},
}


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for event in (CREATED, ENDINGS[self.path.split("/")[1].replace("_", " ")]):
            self.wfile.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
print("openai", openai.__version__)
seen = {}
for ending in ENDINGS:
    base = f"http://127.0.0.1:{server.server_port}/{ending.replace(' ', '_')}"
    client = openai.OpenAI(base_url=base, api_key="x", max_retries=0)
    try:
        events = [event.type for event in client.responses.create(model="m", input="a", stream=True)]
        seen[ending] = f"events {', '.join(events)}"
    except Exception as error:
        seen[ending] = f"raises {type(error).__name__}"
    print(f"{ending}: {seen[ending]}")
kinds = [what.split()[0] for what in seen.values()]
raise SystemExit(0 if kinds == ["events", "events", "events", "raises"] else f"changed: {kinds}")
PY
"$folder/env/bin/python" "$folder/show.py"
