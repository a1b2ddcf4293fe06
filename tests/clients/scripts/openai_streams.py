"""500 streams of one AsyncOpenAI at once: each must end whole.

python openai_streams.py BASE_URL
"""

import asyncio
import json
import sys

import openai

STREAMS = 500
TOKENS = 12


async def one(api: openai.AsyncOpenAI, number: int) -> bool:
    """Whether the stream of that number came whole."""
    stream = await api.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": f"number {number}"}],
        max_tokens=TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = [chunk async for chunk in stream]
    ends = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    usage = chunks[-1].usage
    return len(ends) == 1 and usage is not None and usage.completion_tokens == TOKENS


async def main() -> None:
    # Its 5 s for a connection are too few for 500 that one busy process opens together.
    given = {"base_url": sys.argv[1], "api_key": "unused", "max_retries": 0, "timeout": 120}
    async with openai.AsyncOpenAI(**given) as api:
        whole = await asyncio.gather(*(one(api, number) for number in range(STREAMS)))
    print(json.dumps({f"{STREAMS} streams at once": "works" if all(whole) else "not whole"}))


asyncio.run(main())
