"""The account BATCH of a region's nats-server, as far as `mesh.batch` speaks to it.

Streams that keep what they acknowledged, over restarts; work queues, whose pull consumers give a
message again that was not acknowledged in time; direct reads. Nothing leaves the region.
"""

import json
from collections import deque
from collections.abc import Mapping
from contextvars import Context
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from nats.aio.msg import Msg
from nats.js.api import RetentionPolicy, StreamConfig

from infra.batch_table import BatchTable
from mesh.batch.pulling import ACK, NAK, NANOSECONDS, TERM
from mesh.batch.streams import kept
from tests.seeds.loop import VirtualLoop

H_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
UNIX_S = 1_800_000_000.0
Headers = Mapping[str, str]


class Kept(NamedTuple):
    subject: str
    data: bytes
    headers: Headers
    at: str


@dataclass(eq=False)
class Pull:
    """A request for messages that waits."""

    client: Any
    inbox: str
    left: int


@dataclass
class Consumer:
    config: dict[str, Any]
    next_seq: int
    pulls: deque[Pull] = field(default_factory=deque)
    taken: dict[int, int] = field(default_factory=dict)  # not acknowledged: which delivery of it
    again: deque[int] = field(default_factory=deque)
    due: dict[int, float] = field(default_factory=dict)  # when one that was taken goes to others
    times: dict[int, int] = field(default_factory=dict)
    delivered: int = 0

    @property
    def acks(self) -> bool:
        return bool(self.config["ack_policy"] == "explicit")


class Stream:
    def __init__(self, config: StreamConfig) -> None:
        self.config, self.seq = config, 0
        self.messages: dict[int, Kept] = {}
        self.consumers: dict[str, Consumer] = {}

    def of(self, pattern: str, start: int = 0) -> list[int]:
        """The numbers of what fits."""
        return [
            seq for seq, one in self.messages.items() if seq >= start and fits(pattern, one.subject)
        ]

    def last(self, subject: str) -> int:
        return max(self.of(subject), default=0)

    def take(self, subject: str, data: bytes, headers: Headers, at: str) -> dict[str, Any]:
        """Store it; the acknowledgement."""
        last, expected = self.last(subject), headers.get(H_EXPECTED)
        if expected is not None and int(expected) != last:
            return refused(10071, f"wrong last sequence: {last}")
        if last and self.config.discard_new_per_subject:
            return refused(10077, "maximum messages per subject exceeded")
        if headers.get("Nats-Rollup") or self.config.max_msgs_per_subject == 1:
            self.messages.pop(last, None)
        self.seq += 1
        self.messages[self.seq] = Kept(subject, data, headers, at)
        return {"stream": self.config.name, "seq": self.seq}

    def next(self, consumer: Consumer) -> int | None:
        while consumer.again:
            if (seq := consumer.again.popleft()) in self.messages:
                return seq
        if consumer.acks and len(consumer.taken) >= consumer.config["max_ack_pending"]:
            return None
        found = self.of(consumer.config["filter_subject"], consumer.next_seq)
        if not found:
            return None
        consumer.next_seq = min(found) + 1
        return min(found)


class Account:
    """One region's, at the face of `Bus` that its clients use."""

    def __init__(self, loop: VirtualLoop, server: Any, delay_s: float) -> None:
        self.loop, self.server, self._delay_s = loop, server, delay_s
        self.streams = {str(one.name): Stream(one) for one in kept(BatchTable())}

    def entered(self, subscription: Any) -> None:
        """Only answers go to subscriptions, and each client's to its own."""

    left = entered

    def down(self) -> None:
        """The server ends: what it kept in memory is lost."""
        for stream in self.streams.values():
            for name, consumer in list(stream.consumers.items()):
                consumer.pulls.clear()
                if consumer.config.get("mem_storage"):
                    del stream.consumers[name]

    def carry(self, client: Any, message: Any) -> None:
        at = max(self.loop.time(), self.server.hangs_until) + self._delay_s
        self.loop.call_at(at, self._arrived, client, message, context=Context())

    def _now(self) -> str:
        return datetime.fromtimestamp(UNIX_S + self.loop.time(), UTC).isoformat()

    def _arrived(self, client: Any, message: Any) -> None:
        if not self.server.is_up or not self.server.has_streams:
            return
        subject, data = message.subject, message.data
        if subject.startswith("$JS.ACK."):
            self._acked(subject.split("."), data)
            self._answer(client, message.reply, b"")
        elif subject.startswith("$JS.API.CONSUMER.MSG.NEXT."):
            self._pull(client, message.reply, *subject.split(".")[5:7], json.loads(data))
        elif subject.startswith("$JS.API.DIRECT.GET."):
            stream, _, of = subject.removeprefix("$JS.API.DIRECT.GET.").partition(".")
            self._read(client, message.reply, self.streams[stream], of, data)
        elif subject.startswith("$JS.API."):
            asked = json.loads(data) if data else {}
            words = subject.split(".")[2:]
            reply = self._api(self.streams[words[2]], words, asked) | {"ts": self._now()}
            self._answer(client, message.reply, json.dumps(reply).encode())
        else:
            for stream in self.streams.values():
                if any(fits(pattern, subject) for pattern in stream.config.subjects or ()):
                    ack = stream.take(subject, data, message.headers or {}, self._now())
                    self._answer(client, message.reply, json.dumps(ack).encode())
                    for consumer in stream.consumers.values():
                        self._fulfil(stream, consumer)

    def _answer(
        self, client: Any, inbox: str, data: bytes, headers: Headers | None = None, reply: str = "",
        subject: str = "",
    ) -> None:  # fmt: skip
        for to in client.subscriptions:
            if inbox and fits(to.pattern, inbox):
                message = Msg(client, subject or inbox, reply, data, dict(headers or {}) or None)
                at = self.loop.time() + self._delay_s
                self.loop.call_at(at, self._deliver, to, message, context=client.process.context)

    def _deliver(self, to: Any, message: Msg) -> None:
        if to.client.is_connected:
            to.take(message)

    def _api(self, stream: Stream, words: list[str], asked: dict[str, Any]) -> dict[str, Any]:
        what, name = f"{words[0]} {words[1]}", words[3] if len(words) > 3 else ""
        if what == "STREAM INFO":
            size = sum(len(one.data) for one in stream.messages.values())
            state: dict[str, Any] = {"messages": len(stream.messages), "bytes": size}
            pattern = asked.get("subjects_filter")
            found = sorted({stream.messages[seq].subject for seq in stream.of(pattern or "")})
            state["subjects"] = dict.fromkeys(found[asked.get("offset", 0) :], 1)
            config = {"max_bytes": stream.config.max_bytes}
            return {"config": config, "created": "1", "state": state, "total": len(found)}
        if what == "STREAM PURGE":
            for seq in stream.of(asked["filter"]):
                del stream.messages[seq]
            return {"success": True}
        if what == "CONSUMER CREATE":
            config = asked["config"]
            stream.consumers.setdefault(name, Consumer(config, config.get("opt_start_seq", 1)))
            return {"config": config}
        consumer = stream.consumers.get(name)
        if consumer is None:
            return refused(10014, "consumer not found")
        if what == "CONSUMER DELETE":
            del stream.consumers[name]
            for pull in consumer.pulls:
                self._end_pull(pull, "409", "Consumer Deleted")
            return {"success": True}
        left = stream.of(consumer.config["filter_subject"], consumer.next_seq)
        return {"num_pending": len(left), "num_ack_pending": len(consumer.taken)}

    def _read(self, client: Any, inbox: str, stream: Stream, of: str, data: bytes) -> None:
        if of:
            if last := stream.last(of):
                self._send_kept(client, inbox, stream, last)
            else:
                self._answer(client, inbox, b"", {"Status": "404"})
            return
        asked = json.loads(data)
        if "multi_last" in asked:
            found = sorted(filter(None, (stream.last(one) for one in asked["multi_last"])))
        else:
            found = stream.of(asked["next_by_subj"], asked["seq"])
        for seq in found[: asked["batch"]]:
            self._send_kept(client, inbox, stream, seq)
        end = {"Status": "204", "Nats-Num-Pending": str(max(0, len(found) - asked["batch"]))}
        self._answer(client, inbox, b"", end if found else {"Status": "404"})

    def _send_kept(self, client: Any, inbox: str, stream: Stream, seq: int) -> None:
        one = stream.messages[seq]
        where = {"Nats-Subject": one.subject, "Nats-Sequence": str(seq), "Nats-Time-Stamp": one.at}
        self._answer(client, inbox, one.data, {**one.headers, **where})

    # Pull consumers.

    def _pull(self, client: Any, inbox: str, stream: str, name: str, asked: dict[str, Any]) -> None:
        consumer = self.streams[stream].consumers.get(name)
        if consumer is None:
            self._answer(client, inbox, b"", {"Status": "503"})
            return
        pull = Pull(client, inbox, asked["batch"])
        consumer.pulls.append(pull)
        ends_at = self.loop.time() + asked["expires"] / NANOSECONDS
        self.loop.call_at(ends_at, self._expired, consumer, pull, context=Context())
        self._fulfil(self.streams[stream], consumer)

    def _expired(self, consumer: Consumer, pull: Pull) -> None:
        if pull in consumer.pulls:
            consumer.pulls.remove(pull)
            self._end_pull(pull, "408", "Request Timeout")

    def _end_pull(self, pull: Pull, status: str, why: str) -> None:
        self._answer(pull.client, pull.inbox, b"", {"Status": status, "Description": why})

    def _fulfil(self, stream: Stream, consumer: Consumer) -> None:
        while consumer.pulls:
            pull = consumer.pulls[0]
            if not pull.client.is_connected or not pull.left:
                consumer.pulls.popleft()
                continue
            if (seq := stream.next(consumer)) is None:
                return
            pull.left -= 1
            self._give(stream, consumer, pull, seq)

    def _give(self, stream: Stream, consumer: Consumer, pull: Pull, seq: int) -> None:
        consumer.delivered += 1
        times = consumer.times[seq] = consumer.times.get(seq, 0) + 1
        left = len(stream.of(consumer.config["filter_subject"], consumer.next_seq))
        where = f"{stream.config.name}.{consumer.config['name']}.{times}.{seq}"
        reply = f"$JS.ACK.{where}.{consumer.delivered}.{int(UNIX_S * NANOSECONDS)}.{left}"
        if consumer.acks:
            self._taken(stream, consumer, seq, consumer.delivered)
        one = stream.messages[seq]
        data = b"" if consumer.config.get("headers_only") else one.data
        self._answer(pull.client, pull.inbox, data, one.headers, reply, one.subject)

    def _taken(self, stream: Stream, consumer: Consumer, seq: int, delivery: int) -> None:
        """Nobody else gets it for as long as `ack_wait`, from now on."""
        consumer.taken[seq] = delivery
        at = self.loop.time() + consumer.config["ack_wait"] / NANOSECONDS
        consumer.due[seq] = at
        self.loop.call_at(at, self._overdue, stream, consumer, seq, at, context=Context())

    def _overdue(self, stream: Stream, consumer: Consumer, seq: int, at: float) -> None:
        if seq in consumer.taken and consumer.due.get(seq) == at:
            self._put_back(stream, consumer, seq)

    def _put_back(self, stream: Stream, consumer: Consumer, seq: int) -> None:
        consumer.taken.pop(seq, None)
        consumer.again.append(seq)
        self._fulfil(stream, consumer)

    def _acked(self, words: list[str], data: bytes) -> None:
        stream = self.streams[words[2]]
        consumer, seq, delivery = stream.consumers.get(words[3]), int(words[5]), int(words[6])
        if consumer is None or not consumer.acks:
            return
        if data in (ACK, TERM):
            consumer.taken.pop(seq, None)
            if stream.config.retention is RetentionPolicy.WORK_QUEUE:
                stream.messages.pop(seq, None)
            self._fulfil(stream, consumer)
        elif consumer.taken.get(seq) != delivery:
            return
        elif data.startswith(NAK):
            delay_s = json.loads(data[len(NAK) :] or b"{}").get("delay", 0) / NANOSECONDS
            consumer.due.pop(seq, None)
            at = self.loop.time() + delay_s
            self.loop.call_at(at, self._put_back, stream, consumer, seq, context=Context())
        else:
            self._taken(stream, consumer, seq, delivery)


def refused(code: int, why: str) -> dict[str, Any]:
    return {"error": {"err_code": code, "description": why}}


def fits(pattern: str, subject: str) -> bool:
    if pattern == subject:
        return True
    wanted, tokens = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted, tokens = wanted[:-1], tokens[: len(wanted) - 1]
    pairs = zip(wanted, tokens, strict=False)
    return len(wanted) == len(tokens) and all(want in ("*", token) for want, token in pairs)
