"""Asks the routers of all regions over their buses about requests (`schemas.explain`)."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

import nats.errors
from nats.aio.msg import Msg

from infra.bus import BusAddress, BusUnreachable
from infra.topology import RegionTable, Topology
from infra.workers import worker_names
from mesh.doctor.connectivity import logged_in
from mesh.doctor.logins import Logins
from schemas import subjects
from schemas.explain import RequestQuestion, RouterRequests, decode_answer, encode_question
from schemas.ids import RegionId
from schemas.wire import WireError

WITHIN_S = 3.0
NO_LOGIN = "no credentials of its observer or operator"
ANSWERS_MAX = 64  # of one region; it has at most 16 routers


@dataclass(frozen=True, slots=True)
class RegionAnswers:
    """What the routers of one region answered. `problem`: why there is not all; None: there is."""

    region: RegionId
    answers: tuple[RouterRequests, ...] = ()
    problem: str | None = None


async def ask_all(
    topology: Topology,
    logins: Mapping[RegionId, Logins],
    question: RequestQuestion,
    within_s: float = WITHIN_S,
) -> list[RegionAnswers]:
    """The answers of every region of the topology; of one without a login, why there is none."""
    asked = (
        ask_region(name, routers_of(region), logins.get(name, Logins()), question, within_s)
        for name, region in topology.regions.items()
    )
    return list(await asyncio.gather(*asked))


async def ask_region(
    name: RegionId,
    routers: set[str],
    logins: Logins,
    question: RequestQuestion,
    within_s: float = WITHIN_S,
) -> RegionAnswers:
    """The answers of one region, at once when these routers have answered."""
    login = logins.observer or logins.operator
    if login is None:
        return RegionAnswers(name, problem=NO_LOGIN)
    try:
        return await _ask_region(name, routers, login, question, within_s)
    except (BusUnreachable, nats.errors.Error, OSError) as error:
        return RegionAnswers(name, problem=str(error) or type(error).__name__)


def routers_of(region: RegionTable) -> set[str]:
    """The names of its routers, or of their workers, as mesh.toml has them."""
    return {str(one) for name in region.routers for one in worker_names(name, region.workers)}


async def _ask_region(
    region: RegionId,
    routers: set[str],
    login: BusAddress,
    question: RequestQuestion,
    within_s: float,
) -> RegionAnswers:
    found: dict[str, RouterRequests] = {}
    unreadable: list[str] = []
    nobody, news = asyncio.Event(), asyncio.Event()

    async def receive(msg: Msg) -> None:
        if msg.headers and msg.headers.get("Status") == "503":
            nobody.set()
        elif len(found) < ANSWERS_MAX:
            try:
                answer = decode_answer(msg.data)
                if answer.region == region:
                    found[answer.router] = answer
            except WireError as error:
                unreadable.append(str(error))
        news.set()

    async with logged_in(login, subjects.INBOX_ROOT, within_s) as connection:
        client = connection.client
        inbox = client.new_inbox()
        await client.subscribe(inbox, cb=receive)
        await client.publish(subjects.requests(region), encode_question(question), reply=inbox)
        try:
            async with asyncio.timeout(within_s):
                while not (nobody.is_set() or routers <= found.keys()):
                    await news.wait()
                    news.clear()
        except TimeoutError:
            pass
    answered = RegionAnswers(region, tuple(found[name] for name in sorted(found)))
    if unreadable:
        return replace(answered, problem=f"an answer can't be read: {unreadable[0]}")
    if silent := routers - found.keys():
        why = "no router runs there" if nobody.is_set() else f"no answer within {within_s:g} s"
        return replace(answered, problem=f"{', '.join(sorted(silent))}: {why}")
    return answered
