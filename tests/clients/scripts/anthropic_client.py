"""Anthropic's client: messages whole and streamed, counted tokens, its errors.

python anthropic_client.py BASE_URL
"""

import json
import sys

import anthropic

CHAT = [{"role": "user", "content": "hi"}]
found = {}
client = anthropic.Anthropic(
    base_url=sys.argv[1].removesuffix("/v1"), api_key="unused", max_retries=0
)
answer = client.messages.create(model="tiny", max_tokens=8, messages=CHAT)
found["messages.create"] = "works" if answer.content[0].text else "no text"
with client.messages.stream(model="tiny", max_tokens=8, messages=CHAT) as stream:
    text = "".join(stream.text_stream)
found["messages.stream"] = "works" if text == answer.content[0].text else f"another text: {text}"
counted = client.messages.count_tokens(model="tiny", messages=CHAT)
is_right = counted.input_tokens == answer.usage.input_tokens
found["messages.count_tokens"] = "works" if is_right else "another count"
try:
    client.messages.create(model="none", max_tokens=8, messages=CHAT)
except anthropic.NotFoundError as error:
    found["an unknown model"] = f"refused: {error.body['error']['type']}"
found["models.list"] = "works" if client.models.list().data else "empty"
print(json.dumps(found))
