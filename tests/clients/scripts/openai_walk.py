"""Calls every method of OpenAI's client once, with arguments made from its signature.

    python openai_walk.py BASE_URL

Prints a JSON object: method → "works", "refused: CODE" for an error in OpenAI's form, or what else
came of it. Left out: methods that call others again and again until a state is reached, and those
that open a websocket.
"""

import inspect
import io
import json
import sys
from functools import cached_property
from typing import Any

import openai

REPEATS = ("poll", "wait_for", "stream_raw", "connect", "upload_file_chunked")
FILES = ("file", "files", "image", "video", "data", "audio_sample", "input_reference")
CHAT = [{"role": "user", "content": "hi"}]
KNOWN: dict[str, Any] = {
    "model": "tiny", "messages": CHAT, "input": "hi", "prompt": "hi", "stream": False,
    "purpose": "batch", "endpoint": "/v1/chat/completions", "completion_window": "24h",
    "encoding_format": "float", "dimensions": None, "stores": [],
}  # fmt: skip


def arguments(method: Any, client: openai.OpenAI) -> dict[str, Any]:
    """A value for each parameter that has no default; of a response, one that is just made."""
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(method).parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if name in FILES or "FileTypes" in str(parameter):
            if parameter.default is parameter.empty:
                found[name] = ("a.wav", io.BytesIO(b"RIFF" + bytes(6400)))
        elif parameter.default is parameter.empty or name in ("model", "input"):
            found[name] = KNOWN.get(name, "x1")
            if name == "response_id":
                found[name] = client.responses.create(model="tiny", input="hi").id
    return found


def methods(resource: Any, path: str) -> list[tuple[str, Any]]:
    """The methods of a resource and of those in it."""
    found = []
    for name in dir(type(resource)):
        if name.startswith(("_", "with_")):
            continue
        member = inspect.getattr_static(type(resource), name)
        if isinstance(member, cached_property):
            inner = getattr(resource, name)
            if type(inner).__module__.startswith("openai.resources"):
                found += methods(inner, f"{path}{name}.")
        elif path and inspect.isfunction(member) and not any(word in name for word in REPEATS):
            found.append((path + name, getattr(resource, name)))
    return found


def outcome(method: Any, client: openai.OpenAI) -> str:
    """What became of a call."""
    try:
        answer = method(**arguments(method, client))
        if hasattr(answer, "__enter__") and not isinstance(answer, openai.BaseModel):
            with answer as entered:
                if hasattr(entered, "__iter__"):
                    for _ in entered:
                        pass
        return "works"
    except openai.APIStatusError as error:
        body = error.body
        if isinstance(body, dict) and {"message", "type", "code"} <= body.keys():
            return f"refused: {body['code']}"
        return f"HTTP {error.status_code} without OpenAI's form: {str(body)[:80]}"
    except Exception as error:
        return f"not sent: {type(error).__name__}: {error}"[:160]


def main() -> None:
    given = {"base_url": sys.argv[1], "api_key": "unused", "admin_api_key": "unused"}
    client = openai.OpenAI(**given, max_retries=0, timeout=20)
    print(json.dumps({name: outcome(method, client) for name, method in methods(client, "")}))


main()
