"""LiteLLM's client: chat, stream, Responses, Messages, embeddings, rerank.

python litellm_client.py BASE_URL
"""

import json
import sys

import litellm

CHAT = [{"role": "user", "content": "hi"}]
given = {"model": "openai/tiny", "api_base": sys.argv[1], "api_key": "unused", "num_retries": 0}
found = {}
whole = litellm.completion(**given, messages=CHAT, max_tokens=8).choices[0].message.content
found["completion"] = "works" if whole else "no text"
stream = litellm.completion(**given, messages=CHAT, max_tokens=8, stream=True)
text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
found["completion, streamed"] = "works" if text == whole else "another text"
answer = litellm.responses(**given, input="hi", max_output_tokens=8)
found["responses"] = "works" if answer.output else "no output"
vectors = litellm.embedding(**given, input=["a", "b"], encoding_format="float").data
found["embedding"] = "works" if len(vectors) == 2 else "no vectors"
print(json.dumps(found))
