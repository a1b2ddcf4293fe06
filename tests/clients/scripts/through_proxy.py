"""OpenAI's client at a proxy whose upstream is the mesh.

python through_proxy.py BASE_URL
"""

import json
import sys

import openai

CHAT = [{"role": "user", "content": "hi"}]
client = openai.OpenAI(base_url=sys.argv[1], api_key="unused", max_retries=0, timeout=60)
found = {}
asked = {"model": "tiny", "messages": CHAT, "max_tokens": 8}
whole = client.chat.completions.create(**asked).choices[0].message.content
found["chat"] = "works" if whole else "no text"
stream = client.chat.completions.create(**asked, stream=True)
text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
found["chat, streamed"] = "works" if text == whole else "another text"
vectors = client.embeddings.create(model="tiny", input=["a", "b"], encoding_format="float").data
found["embeddings"] = "works" if len(vectors) == 2 else "no vectors"
answer = client.responses.create(model="tiny", input="hi", max_output_tokens=16)
found["responses"] = "works" if answer.output_text else "no text"
print(json.dumps(found))
