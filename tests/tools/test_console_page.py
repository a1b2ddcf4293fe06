"""The console in a real Chromium, over a mesh under load: by keyboard, in light and dark, 360 px
wide, read-only and with the key, and while a region's nats-server is stopped.

MESH_PICTURES=docs keeps pictures of it there. The last line printed counts checks and views.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from nats.aio.msg import Msg

from infra import bus
from infra.bus import BusAddress
from infra.process import end_all
from schemas import subjects
from schemas.explain import RequestLife, RouterRequests, decode_question, encode_answer
from schemas.ids import RegionId, RouterId
from tests.support.mesh_up import MeshUp, mesh_up, write_config
from tests.tools.chromium import Chromium, Keys

pytestmark = [
    pytest.mark.tools,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="module"),
]

REPLICAS = {"us": 2, "eu": 2, "ap": 1}
CLIENTS = {"us": 5, "eu": 1}
RTT_MS = {("us", "eu"): 40, ("us", "ap"): 75, ("eu", "ap"): 110}
LOCATIONS = {"us": [38.9, -77.5], "eu": [50.1, 8.7], "ap": [35.7, 139.7]}
PAUSE_S = 0.2
HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
NARROW_PX = 360
PICTURES = os.environ.get("MESH_PICTURES")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MeshUp]:
    """Three regions; us has more clients than the others."""
    folder = tmp_path_factory.mktemp("mesh")
    config = write_config(folder, replicas=REPLICAS, rtt_ms=RTT_MS)
    text = config.read_text()
    for name, place in LOCATIONS.items():
        text = text.replace(f"[regions.{name}]\n", f"[regions.{name}]\nlocation = {place}\n")
    config.write_text(text)
    async with mesh_up(folder, config=config, time_scale=2.0) as running:
        clients = [
            asyncio.create_task(client(running, region, number))
            for region, count in CLIENTS.items()
            for number in range(count)
        ]
        clients.append(asyncio.create_task(hostile_router(running)))
        try:
            yield running
        finally:
            await end_all(clients)


async def client(mesh: MeshUp, region: str, number: int) -> None:
    """Conversations that begin alike."""
    url = mesh.endpoint(region) + "/v1/chat/completions"
    async with aiohttp.ClientSession() as session:
        while True:
            body = {"model": mesh.model, "stream": True, "max_tokens": 60,
                    "messages": [{"role": "system", "content": f"company {number}. " * 150},
                                 {"role": "user", "content": os.urandom(64).hex()}]}  # fmt: skip
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post(url, json=body) as answer:
                    await answer.read()
            await asyncio.sleep(PAUSE_S)


async def hostile_router(mesh: MeshUp) -> None:
    """Answers what the page asks routers with texts that would do something if they were markup."""
    login = mesh.credentials("us", "router")
    address = BusAddress(login["NATS_URL"], login["NATS_USER"], login["NATS_PASSWORD"])
    client = await bus.connect(address, name="hostile", inbox_prefix=subjects.INBOX_ROOT)

    async def answer(msg: Msg) -> None:
        now = time.time()
        life = RequestLife(
            request=HOSTILE,
            region=RegionId("us"),
            router=RouterId("r2"),
            status=500,
            route="/v1/x",
            outcome="failed",
            model=HOSTILE,
            detail=HOSTILE,
            arrived_at=now - 9.0,
            ended_at=now - 1.0,
        )
        lives = (life,) if decode_question(msg.data).request in (None, HOSTILE) else ()
        found = RouterRequests(region=life.region, router=life.router, kept=1, requests=lives)
        await msg.respond(encode_answer(found))

    await client.subscribe(subjects.requests("us"), cb=answer)
    try:
        await asyncio.Event().wait()
    finally:
        await bus.close(client)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    browser = Chromium()
    try:
        yield browser
    finally:
        browser.close()


def url(mesh: MeshUp) -> str:
    return str(mesh.record["regions"]["us"]["console"])


def picture(chromium: Chromium, name: str) -> None:
    chromium.views.add(name)
    if PICTURES:
        chromium.picture(Path(PICTURES) / f"{name}.png")


def state_of(chromium: Chromium, replica: str) -> str:
    return chromium.text(f'#replicas tr[data-key$="/{replica}"] .c-state')


def loaded(chromium: Chromium) -> bool:
    nodes = chromium.texts("#map .node.good")
    return len(nodes) == 3 and len(chromium.texts("#requests tr.row")) > 10


async def test_the_map_the_tables_and_both_colours(mesh, chromium):
    await asyncio.to_thread(look_at_it, chromium, url(mesh))


def look_at_it(chromium: Chromium, address: str) -> None:
    chromium.prefer("dark")
    chromium.resize(1280, 860)
    chromium.open(address)
    chromium.until(lambda: loaded(chromium), "regions, replicas and requests are shown")
    chromium.until(lambda: len(chromium.texts("#map .rtt")) == 3, "each link has its round trip")
    chromium.check(chromium.text("#mesh-name") == "test", "the mesh's name")
    chromium.check("seen from us/r1" in chromium.text("#from"), "who shows it")
    chromium.check(len(chromium.texts("#replicas tr.row")) == 5, "every replica has a row")
    chromium.until(
        lambda: HOSTILE in chromium.texts("#requests .c-request"), "a name that is markup"
    )
    not_run(chromium)
    dark = both_colours(chromium)
    picture(chromium, "console-dark")
    chromium.prefer("light")
    light = both_colours(chromium)
    chromium.check(dark != light, "light and dark differ")
    chromium.press("t", "t")
    chromium.check(both_colours(chromium) == dark, "dark by the toggle, whatever the system says")
    chromium.press("t")
    chromium.check(both_colours(chromium) == light, "and as the system says again")


def not_run(chromium: Chromium) -> None:
    chromium.check(not chromium.script("return document.images[1]"), "no image but its own")
    chromium.check("owned" not in chromium.driver.title, "nothing of it was run")


def both_colours(chromium: Chromium) -> str:
    """The background; every text must be read easily on its own."""
    seen, low = chromium.low_contrasts()
    chromium.check(seen > 50 and not low, f"contrasts of {seen} texts: {low}")
    return str(chromium.script("return getComputedStyle(document.body).backgroundColor"))


async def test_by_keyboard_alone(mesh, chromium):
    await asyncio.to_thread(by_keyboard, chromium)


def by_keyboard(chromium: Chromium) -> None:
    reached = set()
    for _ in range(40):
        chromium.press(Keys.TAB)
        reached.add(chromium.focused())
    controls = {"access", "theme", "help", "us", "eu", "ap", "filter", "order", "replicas-0"}
    chromium.check(controls <= reached, f"Tab reaches {controls - reached}")
    chromium.check(any(one.startswith("us/us-") for one in reached), "and a row")

    chromium.press("1", Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    chromium.check(chromium.focused() == "us", "arrows move in the map")
    chromium.press(Keys.ENTER)
    chromium.until(lambda: chromium.text("#panel-title") == "us", "Enter chooses the region")
    panel = chromium.text("#panel-body")
    for text in ("ready", "Round trips", "eu", "policy", "pushing", "Operators' orders"):
        chromium.check(text in panel, f"its panel says {text}")
    rows = chromium.texts("#replicas tr.row th")
    chromium.check(rows == ["us-0", "us-1"], f"its replicas alone: {rows}")
    chromium.press(Keys.ESCAPE)
    chromium.check(len(chromium.texts("#replicas tr.row")) == 5, "Escape shows all again")

    chromium.press("/", *"eu-1")
    chromium.check(chromium.texts("#replicas tr.row th") == ["eu-1"], "the filter")
    chromium.press(Keys.ESCAPE)
    chromium.check(len(chromium.texts("#replicas tr.row")) == 5, "Escape ends it")

    chromium.press("2", Keys.END)
    chromium.check(
        chromium.focused().startswith("ap/") or "-" in chromium.focused(), "the last row"
    )
    chromium.press(Keys.ENTER)
    chromium.until(lambda: "kv_capacity_tokens" in chromium.text("#detail-body"), "its heartbeat")
    chromium.press(Keys.ESCAPE)
    chromium.check(not chromium.is_open("detail"), "Escape closes it")
    chromium.press("?")
    chromium.check(chromium.is_open("help-dialog"), "help")
    chromium.press(Keys.ESCAPE)


async def test_a_requests_timeline_names_who_was_not_chosen_and_why(mesh, chromium):
    await asyncio.to_thread(open_a_request, chromium)


def open_a_request(chromium: Chromium) -> None:
    choose_order(chromium, "slowest")
    chromium.check(HOSTILE in chromium.text("#requests tr.row"), "the slowest first")
    chromium.press("3", Keys.HOME, Keys.ARROW_DOWN, Keys.ENTER)
    chromium.until(lambda: "first byte to the client" in chromium.text("#detail-body"), "its steps")
    text = chromium.text("#detail-body")
    for part in ("Most of its", "to the first byte, of which", "arrived", "ended: 200", "chosen"):
        chromium.check(part in text, f"the timeline says {part!r}")
    places = chromium.texts(".candidates .what")
    chromium.check(len(places) > 1, f"every candidate is named: {places}")
    chromium.check("not chosen:" in text or "not available:" in text, "and why it was not chosen")
    seen, low = chromium.low_contrasts()
    chromium.check(not low, f"contrasts of {seen} texts: {low}")
    picture(chromium, "console-request")
    chromium.press(Keys.ESCAPE)
    until_back_in_requests(chromium)
    choose_order(chromium, "failed")
    chromium.until(lambda: chromium.texts("#requests .c-outcome")[:1] == ["failed"], "failed first")
    chromium.press("3", Keys.HOME, Keys.ENTER)
    chromium.until(lambda: HOSTILE in chromium.text("#detail-body"), "what that router says")
    not_run(chromium)
    chromium.press(Keys.ESCAPE)
    until_back_in_requests(chromium)
    choose_order(chromium, "newest")


def until_back_in_requests(chromium: Chromium) -> None:
    """A closed dialog gives the focus back a little later: keys typed before would go astray."""
    within = "return document.activeElement.closest('#requests') !== null"
    chromium.until(lambda: chromium.script(within), "the keyboard is where it was")


def choose_order(chromium: Chromium, name: str) -> None:
    """By arrows: letters of one word that a busy machine types slowly are taken for several."""
    chromium.script("document.getElementById('order').focus()")
    chromium.press(Keys.HOME)
    for _ in range(chromium.script("return order.length")):
        if chromium.script("return order.value") == name:
            break
        chromium.press(Keys.ARROW_DOWN)
    chromium.until(lambda: chromium.script("return order.value") == name, f"{name} first")
    chromium.script("document.activeElement.blur()")


async def test_at_360_pixels_nothing_is_beside_the_screen(mesh, chromium):
    await asyncio.to_thread(narrow, chromium, url(mesh))


def narrow(chromium: Chromium, address: str) -> None:
    chromium.resize(NARROW_PX, 780)
    chromium.open(address)
    chromium.until(lambda: loaded(chromium), "the page, narrow")
    chromium.check(chromium.width() == NARROW_PX, f"{chromium.width()} px wide")
    picture(chromium, "console-narrow")
    chromium.click('#map [data-key="us"]')
    chromium.until(lambda: chromium.text("#panel-title") == "us", "a click chooses a region")
    chromium.check(chromium.width() == NARROW_PX, f"{chromium.width()} px wide with a region")
    visible = chromium.texts("#replicas thead th")
    chromium.check({"replica", "state"} <= set(visible) and len(visible) < 9, f"columns {visible}")
    chromium.press("3", Keys.ENTER)
    chromium.until(lambda: "What happened" in chromium.text("#detail-body"), "a request, narrow")
    chromium.check(chromium.width() <= NARROW_PX, f"{chromium.width()} px wide with a request")
    chromium.views.add("request, narrow")
    chromium.press(Keys.ESCAPE, Keys.ESCAPE)
    chromium.resize(1280, 860)


REFUSED = """
const done = arguments[0];
fetch("/api/orders", { method: "POST", headers: { "content-type": "application/json" },
  body: JSON.stringify({ verb: "drain", region: "us" }) }).then((answer) => done(answer.status));
"""


async def test_read_only_without_the_key_and_a_drain_with_it(mesh, chromium):
    key = Path(mesh.record["console_key"]).read_text()
    await asyncio.to_thread(drain, chromium, url(mesh), key)


def drain(chromium: Chromium, address: str, key: str) -> None:
    chromium.open(address)
    chromium.until(lambda: loaded(chromium), "the page")
    chromium.check(chromium.text("#access") == "Read-only", "it says that it is read-only")
    open_replica(chromium, "us-1")
    chromium.check(not chromium.texts("#detail-actions button"), "no button to drain")
    chromium.check("Read-only" in chromium.text("#detail-actions"), "it says why")
    chromium.press(Keys.ESCAPE, Keys.ESCAPE)
    chromium.check(chromium.driver.execute_async_script(REFUSED) == 401, "no order without a key")

    chromium.click("#access")
    chromium.fill("#key", "a-key-that-is-wrong")
    chromium.press(Keys.ENTER)
    chromium.until(lambda: "not the admin key" in chromium.text("#access-error"), "a wrong key")
    chromium.fill("#key", key)
    chromium.fill("#name", "ann")
    chromium.press(Keys.ENTER)
    chromium.until(lambda: chromium.text("#access") == "May change", "the right one")
    order(chromium, "us-1", "drain", "new fan")
    chromium.until(lambda: state_of(chromium, "us-1") == "drained", "the replica is drained")
    chromium.press("1", Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ENTER)
    chromium.until(lambda: "new fan" in chromium.text("#panel-body"), "why, in its region's panel")
    chromium.check("ann at 127.0.0.1" in chromium.text("#panel-body"), "and by whom")
    picture(chromium, "console-light")
    chromium.click("#region-changes")
    chromium.until(lambda: "drain replica us-1" in chromium.text("#detail-body"), "the changes")
    chromium.press(Keys.ESCAPE, Keys.ESCAPE)
    order(chromium, "us-1", "undrain", "")
    chromium.until(lambda: state_of(chromium, "us-1") == "ready", "it takes work again")
    stored = chromium.script("return JSON.stringify([localStorage, document.cookie])")
    chromium.check(key not in stored, "the key is in this tab alone")
    chromium.click("#access")
    chromium.click("#lock")
    chromium.check(chromium.text("#access") == "Read-only", "locked again")


def open_replica(chromium: Chromium, replica: str) -> None:
    chromium.fill("#filter", replica)
    chromium.press(Keys.TAB, "2", Keys.ENTER)
    chromium.until(
        lambda: chromium.is_open("detail") and replica in chromium.text("#detail-title"),
        f"{replica} is open",
    )


def order(chromium: Chromium, replica: str, verb: str, reason: str) -> None:
    open_replica(chromium, replica)
    chromium.until(lambda: chromium.texts(f"#replica-{verb}"), f"a button to {verb}")
    chromium.click(f"#replica-{verb}")
    chromium.fill("#reason", reason)
    chromium.click("#order-go")
    chromium.until(lambda: not chromium.is_open("order-dialog"), "the order was written")
    chromium.press(Keys.ESCAPE, Keys.ESCAPE)


async def test_what_is_old_is_pale_and_has_its_age(mesh, chromium):
    pid = mesh.record["processes"]["nats-ap"]
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.to_thread(stale, chromium)
    finally:
        os.kill(pid, signal.SIGCONT)


def stale(chromium: Chromium) -> None:
    node = '#map [data-key="ap"]'
    chromium.until(lambda: chromium.texts(f"{node}.bad"), "the region is marked")
    chromium.until(lambda: "bus away" in chromium.text(node), "its bus is away")
    chromium.until(lambda: "ap: its bus is away" in chromium.text("#notes"), "a note says so")
    row = '#replicas tr.old[data-key="ap/ap-0"]'
    chromium.until(lambda: chromium.texts(row), "its replica's row is pale")
    chromium.check(" s" in chromium.text(f"{row} .c-age"), "and says how old it is")
    chromium.check("ap" in chromium.text("#panel-body"), "the overview lists it")
    seen, low = chromium.low_contrasts()
    chromium.check(not low, f"contrasts of {seen} texts: {low}")
    picture(chromium, "console-stale")


async def test_nothing_failed_in_the_browser_and_no_other_host_was_asked(mesh, chromium):
    await asyncio.to_thread(at_the_end, chromium, url(mesh))
    print(f"{chromium.checks} checks on {len(chromium.views)} views of the console")


def at_the_end(chromium: Chromium, address: str) -> None:
    logged = chromium.errors()
    refused = [one for one in logged if "401" in one]  # of the order and of the wrong key
    absent = [one for one in logged if "404" in one and "/api/request?" in one]  # not kept any more
    others = [one for one in logged if one not in (*refused, *absent)]
    chromium.check(others == [] and len(refused) <= 2, f"{logged}")
    asked = chromium.requested()
    chromium.check(len(asked) > 20, f"{len(asked)} requests")
    elsewhere = {one for one in asked if not one.startswith((address, "data:", "chrome:"))}
    chromium.check(not elsewhere, f"asked elsewhere: {elsewhere}")
