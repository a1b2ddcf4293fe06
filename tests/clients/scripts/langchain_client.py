"""langchain-openai: chat models over both APIs, whole and streamed, and embeddings.

python langchain_client.py BASE_URL
"""

import json
import sys

from langchain_openai import ChatOpenAI, OpenAIEmbeddings

given = {"base_url": sys.argv[1], "api_key": "unused", "model": "tiny", "max_retries": 0}
found = {}
for name, more in (("chat", {}), ("Responses", {"use_responses_api": True})):
    model = ChatOpenAI(**given, **more, max_tokens=8)
    whole = model.invoke("hi").text
    streamed = "".join(chunk.text for chunk in model.stream("hi"))
    found[f"ChatOpenAI over {name}: invoke"] = "works" if whole else "no text"
    found[f"ChatOpenAI over {name}: stream"] = "works" if streamed == whole else "another text"
vectors = OpenAIEmbeddings(**given, check_embedding_ctx_length=False).embed_documents(["a", "b"])
found["OpenAIEmbeddings"] = "works" if len(vectors) == 2 and vectors[0] else "no vectors"
print(json.dumps(found))
