"""A batch job as a client runs it, with OpenAI's SDK, and the check of what comes back."""

import asyncio
import io
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson
from openai import APIConnectionError, APIError, APIStatusError, AsyncOpenAI
from openai.types import Batch

ENDED = ("completed", "failed", "expired", "cancelled")
CALL_S = 30.0
PATIENCE_S = 120.0  # for a region whose routers or nats-server were killed
LOOK_S = 0.25

T = TypeVar("T")


def input_file(model: str, lines: int, *, prompt_words: int = 60, output_tokens: int = 16) -> bytes:
    """A job's lines: documents in groups of ten that share a beginning, as evaluations have."""
    rows = []
    for number in range(lines):
        group = number // 10
        words = " ".join(f"word{group}-{place}" for place in range(prompt_words))
        body = {
            "model": model,
            "messages": [{"role": "user", "content": f"{words}. Question {number}?"}],
            "max_tokens": output_tokens,
        }
        row = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions"}
        rows.append(orjson.dumps(row | {"body": body}))
    return b"\n".join(rows) + b"\n"


@dataclass(slots=True)
class Answers:
    """What the output and error files of one job hold."""

    status: str
    seconds: float  # from the job's creation to its end
    by_id: Counter[str] = field(default_factory=Counter)
    answered: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    def problems(self, lines: int) -> list[str]:
        """Why not every line was answered exactly once."""
        wanted = {f"line-{number}" for number in range(lines)}
        missing = wanted - self.by_id.keys()
        repeated = [name for name, count in self.by_id.items() if count > 1]
        unknown = self.by_id.keys() - wanted
        found = []
        if self.status != "completed":
            found.append(f"the job is {self.status}")
        if missing:
            found.append(f"{len(missing)} lines are missing, like {min(missing)}")
        if repeated:
            found.append(f"{len(repeated)} lines came twice, like {min(repeated)}")
        if unknown:
            found.append(f"{len(unknown)} lines were not in the input, like {min(unknown)}")
        if self.errors:
            found.append(f"errors: {dict(self.errors)}")
        return found


class JobClient:
    """One region's client. A call that meets a killed router is made again, for PATIENCE_S."""

    def __init__(self, endpoint: str) -> None:
        self.openai = AsyncOpenAI(
            base_url=f"{endpoint}/v1", api_key="unused", timeout=CALL_S, max_retries=0
        )

    async def submit(self, data: bytes, window: str = "24h") -> Batch:
        file = await self._patiently(
            lambda: self.openai.files.create(file=("job.jsonl", io.BytesIO(data)), purpose="batch")
        )
        return await self._patiently(
            lambda: self.openai.batches.create(
                input_file_id=file.id,
                endpoint="/v1/chat/completions",
                completion_window=window,  # type: ignore[arg-type]
            )
        )

    async def get(self, job: str) -> Batch:
        return await self._patiently(lambda: self.openai.batches.retrieve(job))

    async def until(self, job: str, fits: Callable[[Batch], bool], within_s: float) -> Batch:
        """Raises TimeoutError with the job as it was last seen."""
        until = time.monotonic() + within_s
        while True:
            batch = await self.get(job)
            if fits(batch):
                return batch
            if time.monotonic() > until:
                raise TimeoutError(f"after {within_s} s: {batch.status}, {batch.request_counts}")
            await asyncio.sleep(LOOK_S)

    async def answers(self, job: str, began: float, within_s: float) -> Answers:
        """Wait for the job's end and read both files."""
        batch = await self.until(job, lambda batch: batch.status in ENDED, within_s)
        found = Answers(batch.status, time.monotonic() - began)
        for file, is_error in ((batch.output_file_id, False), (batch.error_file_id, True)):
            if file is None:
                continue
            text = await self._content(file)
            for row in map(orjson.loads, text.splitlines()):
                found.by_id[row["custom_id"]] += 1
                if is_error:
                    found.errors[_code(row)] += 1
                else:
                    found.answered += 1
        return found

    async def delete_files(self, batch: Batch) -> None:
        for file in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
            if file is not None:
                await self.openai.files.delete(file)

    async def _content(self, file: str) -> bytes:
        async def read() -> bytes:
            return (await self.openai.files.content(file)).content

        return await self._patiently(read)

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """A killed process shows to clients as a broken connection or a 5xx.

        A job that was created and whose answer was lost is created twice then: drills begin their
        faults after that.
        """
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                return await call()
            except APIStatusError as error:
                if error.status_code < 500 or time.monotonic() > until:
                    raise
            except (APIConnectionError, APIError):
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(LOOK_S)


def _code(row: dict[str, Any]) -> str:
    error = row.get("error") or {}
    response = row.get("response") or {}
    return str(error.get("code") or response.get("status_code"))
