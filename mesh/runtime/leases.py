"""Leases on the bus: claims out, what their streams say in, and signs of life that tell of them.

A claim is a publish to the lease's subject that names the last write it knows; the stream's answer
comes to an inbox whose last token is random, so that no agent can grant us anything. What a stream
takes it says again on a subject of its own (`schemas.catalog`: leased), with the write's number in
a header; but for the stream, only that region's own routers can speak there.
"""

import logging
import re
import secrets
from collections.abc import Callable

import orjson
from nats.aio.msg import Msg

from infra.limited_log import LimitedLog
from mesh.adapters.adopted_beats import AdoptedBeats
from mesh.adapters.bus import RouterBus, is_no_responders
from mesh.adapters.metrics import RouterMetrics
from mesh.adapters.streams import H_EXPECTED, WRONG_LAST_SEQUENCE
from mesh.core import effects as fx
from mesh.core import events as ev
from mesh.core.federation.ownership import Ownership
from mesh.runtime.config import RouterConfig
from schemas import exchange, state, subjects, wire
from schemas.replies import LEASE_PREFIX

log = logging.getLogger(__name__)

TOKEN_BYTES = 12
AWAITED_MAX = 256
# What the server adds to the stream's own messages, and to all others that it reads out of one.
H_SEQUENCE, H_STREAM, H_SUBJECT = "Nats-Sequence", "Nats-Stream", "Nats-Subject"
_NUMBER = re.compile(r"\d{1,18}$")


class Leases:
    """One router's. `hear…` is called by the bus, the rest performs effects."""

    def __init__(
        self,
        config: RouterConfig,
        bus: RouterBus,
        metrics: RouterMetrics,
        feed: Callable[[ev.Event], None],
        ownership: Ownership,
        beats: AdoptedBeats,
    ) -> None:
        self._config = config
        self._bus = bus
        self._metrics = metrics
        self._feed = feed
        self._ownership = ownership
        self._beats = beats
        self._log = LimitedLog(log)
        self._awaited: dict[str, int] = {}  # last token of an inbox → number of the claim

    def hear(self, msg: Msg) -> None:
        """A stream has taken a write."""
        headers = msg.headers or {}
        number = headers.get(H_SEQUENCE, "")
        try:
            lease = state.decode_lease(msg.data)
        except wire.WireError as error:
            self._drop(msg, "it can't be read", error)
            return
        place = (subjects.STREAM_LEASES, subjects.lease(lease.region))
        is_its_own = (headers.get(H_STREAM), headers.get(H_SUBJECT)) == place
        is_its_own = is_its_own and lease.region == subjects.owner(msg.subject)
        if not is_its_own or not _NUMBER.fullmatch(number):
            self._drop(msg, "no write of that region's stream")
        else:
            self._feed(ev.LeaseHeard(lease, int(number)))

    def hear_answer(self, msg: Msg) -> None:
        """What a stream says to our claim."""
        number = self._awaited.pop(msg.subject.rpartition(".")[2], None)
        if number is None:
            return
        if is_no_responders(msg.headers):
            self._feed(ev.LeaseAnswered(number, granted=False, seq=None))
            return
        try:
            self._feed(_answered(number, msg.data))
        except ValueError as error:
            self._drop(msg, "the answer can't be read", error)
            self._feed(ev.LeaseAnswered(number, granted=False, seq=None))

    def claim(self, effect: fx.ClaimLease) -> None:
        """Ask the stream to take this write."""
        token = f"{LEASE_PREFIX}{effect.number}-{secrets.token_hex(TOKEN_BYTES)}"
        while len(self._awaited) >= AWAITED_MAX:
            del self._awaited[next(iter(self._awaited))]
        self._awaited[token] = effect.number
        inbox = subjects.inbox(self._config.region, self._config.router, token)
        headers = {H_EXPECTED: str(effect.expected)}
        data = state.encode_state(effect.lease)
        self._bus.publish(subjects.lease(effect.lease.region), data, reply=inbox, headers=headers)

    def changed(self, effect: fx.OwnershipChanged) -> None:
        """Agents must know at once."""
        if effect.region != self._config.region:
            verb = "adopted" if effect.owned else "handed back"
            log.warning("the replicas of region %s are %s", effect.region, verb)
        self.say_alive()

    def hear_replicas(self, effect: fx.HearReplicas) -> None:
        """A region that is adopted, or was a moment ago, is listened to."""
        self._beats.want(effect.region, wanted=effect.wanted)

    def say_alive(self) -> None:
        """A sign of life, with what this router owns."""
        owned = self._ownership.owned
        sign = exchange.Alive(self._config.epoch, tuple(owned), tuple(owned.values()))
        subject = subjects.alive(self._config.region, self._config.router)
        self._bus.publish(subject, wire.encode(sign))

    def _drop(self, msg: Msg, why: str, error: object = "") -> None:
        self._metrics.leases_dropped.inc()
        text = "lease on %s dropped: %s %.300s"
        self._log.warning("lease", why, text, msg.subject, why, error)


def _answered(number: int, data: bytes) -> ev.LeaseAnswered:
    """JetStream's acknowledgement. Raises ValueError for one that says neither yes nor no."""
    said = orjson.loads(data)
    error = said.get("error") if isinstance(said, dict) else None
    if isinstance(error, dict) and error.get("err_code") == WRONG_LAST_SEQUENCE:
        last = _NUMBER.search(str(error.get("description")))
        if last is None:
            raise ValueError(f"which sequence is the last? {str(error)[:200]}")
        return ev.LeaseAnswered(number, granted=False, seq=int(last[0]))
    if error is not None or not isinstance(said, dict) or type(said.get("seq")) is not int:
        raise ValueError(f"not taken: {str(said)[:200]}")
    return ev.LeaseAnswered(number, granted=True, seq=said["seq"])
