// The console: asks its router for a frame every second, draws it, and answers keys.

import { Access } from "/access.js";
import { changesList, overview, pill, regionPanel, replicaDetail, requestDetail, showDialog } from "/details.js";
import { ago, byId, el, redrawn, redrawnFor, setText } from "/dom.js";
import { RegionMap } from "/map.js";
import { Table } from "/table.js";

const EVERY_MS = 1000;
const WITHIN_MS = 8000;
const SILENT_MS = 3500; // without a frame: what is shown is old
const SAID_MS = 6000;
const THEMES = ["auto", "light", "dark"];
const BUS_LEVEL = { away: "bad", connecting: "old" };
const BAD_FIRST = { bad: 0, warning: 1 };

let frame = null;
let receivedAt = 0;
let chosen = null; // a region
let opened = null; // what the detail shows: {kind, region, replica}
let following = null; // a replica or region that is being drained

const say = (text) => {
  const line = byId("said");
  line.hidden = false;
  line.textContent = text;
  clearTimeout(say.timer);
  say.timer = setTimeout(() => { line.hidden = true; }, SAID_MS);
};
const access = new Access(say, (order) => {
  if (order) following = order.verb === "drain" ? order : null;
  draw();
  poll();
});
const map = new RegionMap(byId("map"), (name) => choose(chosen === name ? null : name));
const tables = {
  replicas: new Table(byId("replicas"), openReplica),
  requests: new Table(byId("requests"), openRequest),
};
for (const table of Object.values(tables)) table.onsort = () => drawTables(true);

// Frames.

let polling = null;
async function poll() {
  clearTimeout(poll.timer);
  if (polling || document.hidden) return;
  polling = new AbortController();
  const limit = setTimeout(() => polling.abort(), WITHIN_MS);
  try {
    const answer = await fetch("/api/fleet", { signal: polling.signal, credentials: "omit", cache: "no-store" });
    const value = await answer.json();
    if (!answer.ok) throw new Error(value.error);
    frame = value;
    receivedAt = Date.now();
    draw();
  } catch (error) {
    poll.problem = error.name === "AbortError" ? "no answer" : error.message;
  } finally {
    clearTimeout(limit);
    polling = null;
    poll.timer = setTimeout(poll, EVERY_MS);
    drawLive();
  }
}
document.addEventListener("visibilitychange", () => poll());
setInterval(drawLive, EVERY_MS);

function drawLive() {
  const silentMs = Date.now() - receivedAt;
  const live = byId("live");
  const silent = !frame || silentMs > SILENT_MS;
  live.className = !frame ? "" : silent ? "bad" : "good";
  setText(byId("live-text"), !frame ? poll.problem ? `no frame yet: ${poll.problem}` : "connecting"
    : silent ? `no answer of the router for ${ago(silentMs / 1000)}` : `live, ${clock(frame.at)} UTC`);
  document.body.classList.toggle("silent", Boolean(frame) && silent);
}

const clock = (at) => new Date(at * 1000).toISOString().slice(11, 19);

// Drawing.

function draw() {
  if (!frame) return;
  if (chosen && !frame.regions.some((one) => one.region === chosen)) chosen = null;
  setText(byId("mesh-name"), frame.mesh);
  setText(byId("from"), `seen from ${frame.region}/${frame.router}`);
  document.title = `${frame.mesh} – mesh console`;
  access.update(frame);
  const notes = byId("notes");
  const text = frame.notes.join("\n");
  if (notes.dataset.text !== text) {
    notes.dataset.text = text;
    notes.replaceChildren(...frame.notes.map((note) => el("p", {}, note)));
  }
  map.draw(frame, chosen);
  drawPanel();
  drawTables();
  if (opened?.kind === "replica" && byId("detail").open) drawReplica();
  follow();
  drawLive();
}

function drawPanel() {
  const region = frame.regions.find((one) => one.region === chosen);
  setText(byId("panel-title"), region ? region.region : "Overview");
  const state = region ? [pill(region.state, region.level),
    region.bus === "connected" ? null : pill(`bus ${region.bus}`, BUS_LEVEL[region.bus] ?? "warning"),
    region.age_s !== null && region.age_s >= frame.stale_s ? el("span", { class: "muted" }, ` ${ago(region.age_s)} old`) : null] : [];
  redrawn(byId("panel-state"), state);
  redrawn(byId("panel-body"), region ? regionPanel(frame, region) : overview(frame));
  const drained = Boolean(region?.orders?.all_drained);
  const what = region ? `${chosen} ${drained} ${access.may(chosen)} ${access.canChange}` : "";
  redrawnFor(byId("panel-actions"), what, () => (region ? [...access.actions(chosen, null, drained),
    ...(access.may(chosen) ? [el("button", { type: "button", id: "region-changes",
      onclick: () => openChanges(region.region) }, "Changes")] : [])] : []));
}

// `asked`: by somebody, not by a new frame.
function drawTables(asked = false) {
  if (!frame) return;
  const wanted = byId("filter").value.trim().toLowerCase();
  const fits = (row) => !wanted || row.cells.some((text) => text.toLowerCase().includes(wanted));
  const { replicas, requests } = frame.tables;
  const near = replicas.rows.filter((row) => (!chosen || row.of.region === chosen) && fits(row));
  const some = requests.rows.filter((row) => (!chosen || row.of.region === chosen || row.of.served === chosen)
    && fits(row));
  tables.replicas.draw(replicas, near);
  setText(byId("replicas-count"), counted(near.length, replicas.rows.length));
  const reading = !asked && requestsRead();
  setText(byId("requests-count"), counted(some.length, requests.rows.length)
    + (reading ? ", stands still while you are in it" : ""));
  if (!reading) tables.requests.draw(requests, ordered(requests.columns, some));
  setText(byId("chosen"), chosen ? `only region ${chosen} (Esc: all)` : "");
}

// New requests would move the one that somebody is about to open.
function requestsRead() {
  const rows = byId("requests").tBodies[0];
  return rows.querySelector("tr.row") !== null && (rows.matches(":hover") || rows.contains(document.activeElement));
}

const counted = (shown, all) => (shown === all ? String(all) : `${shown} of ${all}`);

function ordered(columns, rows) {
  const at = (title) => columns.findIndex((one) => one.title === title);
  const [arrived, wait] = [at("arrived"), at("wait ms")];
  const newest = (a, b) => b.values[arrived] - a.values[arrived];
  const rank = (row) => BAD_FIRST[row.level] ?? 2;
  const slowest = (a, b) => (b.values[wait] ?? -1) - (a.values[wait] ?? -1);
  const by = { newest, slowest, failed: (a, b) => rank(a) - rank(b) || newest(a, b) };
  return [...rows].sort(by[byId("order").value]);
}

function choose(name) {
  chosen = name;
  draw();
  drawTables(true);
}

// What is being drained, until nothing runs there.
function follow() {
  if (!following) return;
  const rows = frame.tables.replicas.rows.filter((row) => row.of.region === following.region
    && (!following.replica || row.of.replica === following.replica));
  const busy = rows.filter((row) => row.level !== "bad" && row.cells[2] !== "drained");
  const what = following.replica ?? `region ${following.region}`;
  if (busy.length) return;
  say(`${what} is drained: nothing runs there.`);
  following = null;
}

// Details.

async function openReplica(row) {
  opened = { kind: "replica", ...row.of, fields: [] };
  drawReplica(true);
  const query = new URLSearchParams({ region: row.of.region, name: row.of.replica });
  const answer = await read(`/api/replica?${query}`);
  if (opened?.replica === row.of.replica) {
    opened.fields = answer.fields ?? [];
    drawReplica();
  }
}

function drawReplica(first = false) {
  const row = frame.tables.replicas.rows.find((one) => one.of.region === opened.region
    && one.of.replica === opened.replica);
  if (!row) return;
  const orders = frame.regions.find((one) => one.region === opened.region)?.orders;
  const drained = Boolean(orders && (orders.all_drained || orders.drained.includes(opened.replica)));
  const body = replicaDetail(frame, row, opened.fields);
  if (first) showDialog(`${opened.replica} of ${opened.region}`, body);
  else redrawn(byId("detail-body"), body);
  const { region, replica } = opened;
  redrawnFor(byId("detail-actions"), `${region}/${replica} ${drained} ${access.may(region)} ${access.canChange}`,
    () => access.actions(region, replica, drained));
}

async function openRequest(row) {
  opened = { kind: "request", request: row.of.request };
  showDialog(`Request ${row.of.request}`, [el("p", { class: "muted" }, "asking the routers …")]);
  const query = new URLSearchParams({ id: row.of.request, region: row.of.region });
  const answer = await read(`/api/request?${query}`);
  if (opened?.request !== row.of.request || !byId("detail").open) return;
  showDialog(`Request ${row.of.request}`, answer.error ? [el("p", { class: "error" }, answer.error),
    ...(answer.notes ?? []).map((note) => el("p", { class: "muted" }, note))] : requestDetail(answer));
}

async function openChanges(region) {
  opened = { kind: "changes" };
  const answer = await access.history(region);
  showDialog(`Changes of ${region}`, answer.ok ? [changesList(answer.changes)]
    : [el("p", { class: "error" }, answer.error)]);
}

async function read(path) {
  try {
    const answer = await fetch(path, { credentials: "omit", cache: "no-store" });
    return await answer.json();
  } catch {
    return { error: "the router does not answer" };
  }
}

// Keys, the theme, dialogs.

byId("filter").addEventListener("input", () => drawTables(true));
byId("order").addEventListener("change", () => {
  tables.requests.sortedBy = null;
  drawTables(true);
});
byId("help").addEventListener("click", () => byId("help-dialog").showModal());
for (const dialog of document.querySelectorAll("dialog")) {
  dialog.querySelector(".close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
}
byId("detail").addEventListener("close", () => {
  const kind = opened?.kind === "replica" ? "replicas" : "requests";
  if (opened && opened.kind !== "changes") tables[kind].focus();
  opened = null;
});

function setTheme(name) {
  const theme = THEMES.includes(name) ? name : "auto";
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  localStorage.setItem("mesh-theme", theme);
  byId("theme").textContent = { auto: "◐ Auto", light: "☀ Light", dark: "☾ Dark" }[theme];
  byId("theme").setAttribute("aria-label", `Colours: ${theme}; change`);
}
const nextTheme = () => setTheme(THEMES[(THEMES.indexOf(localStorage.getItem("mesh-theme") ?? "auto") + 1) % THEMES.length]);
setTheme(localStorage.getItem("mesh-theme"));
byId("theme").addEventListener("click", nextTheme);

const KEYS = {
  "/": () => byId("filter").focus(),
  "?": () => byId("help-dialog").showModal(),
  t: nextTheme,
  1: () => (document.querySelector("#map .node.chosen") ?? document.querySelector("#map .node"))?.focus(),
  2: () => tables.replicas.focus(),
  3: () => tables.requests.focus(),
};
document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") {
    const field = byId("filter");
    if (field.value) field.value = "";
    else chosen = null;
    if (document.activeElement === field) field.blur();
    draw();
    drawTables(true);
    return;
  }
  const typing = event.target.closest?.("input, select, textarea");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
  event.preventDefault();
  KEYS[event.key]();
});

poll();
