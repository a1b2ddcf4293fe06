// What a region, a replica or a request consists of.

import { ago, byId, count, DASH, el, ms, percent, rate, redrawn, redrawnFor } from "/dom.js";

const TERMS = ["rtt_s", "line_s", "queue_s", "prefill_s", "base_s", "transfer_s", "decode_queue_s", "memory_s",
  "load_s", "others_s"];
const NAMES = { rtt_s: "round trip", line_s: "held before it", queue_s: "queue", prefill_s: "prefill",
  base_s: "base", transfer_s: "transfer", decode_queue_s: "decode queue", memory_s: "memory",
  load_s: "adapter load", others_s: "others" };
const PARTS = { held_s: "held", peer_held_s: "held by peer", handed_back_s: "held by peers, handed back",
  earlier_attempts_s: "earlier attempts", prefill_s: "prefill", engine_s: "engine",
  transport_s: "transport", attempt_s: "attempt", unanswered_s: "unanswered", other: "other" };
const TINY_S = 0.0005;

export const pill = (text, level) => el("span", { class: `pill ${level}` }, text);

function facts(pairs, kind = "facts") {
  return el("dl", { class: kind }, pairs.filter(([, value]) => value !== null)
    .map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

// The panel beside the map.

export function overview(frame) {
  const sum = (name) => frame.regions.reduce((total, one) => total + (one[name] ?? 0), 0);
  const serving = frame.regions.filter((one) => one.state === "serving").length;
  const wrong = [
    ...frame.regions.filter((one) => one.level !== "good").map((one) => ({ name: one.region,
      text: one.bus === "away" ? `bus away, last seen ${one.state}` : one.state, level: one.level,
      age: one.age_s })),
    ...frame.tables.replicas.rows.filter((row) => row.level !== "good").map((row) => ({
      name: `${row.of.region}/${row.of.replica}`, text: row.cells[2], level: row.level, age: row.age_s })),
  ];
  const rank = { bad: 0, warning: 1, old: 2 };
  wrong.sort((a, b) => rank[a.level] - rank[b.level]);
  const shown = wrong.slice(0, 8);
  return [
    facts([
      ["regions serving", `${serving}/${frame.regions.length}`],
      ["replicas ready", `${sum("ready")}/${sum("replicas")}`],
      ["requests/s", rate(sum("requests_per_s"))],
      ["running", count(sum("running"))],
      ["pending", count(sum("pending"))],
      ["held", count(sum("held"))],
    ], "numbers"),
    el("h3", {}, "Needs a look"),
    shown.length ? el("ul", { class: "wrong" }, shown.map((one) => el("li", {},
      el("span", { class: "what" }, one.name), pill(one.text, one.level),
      one.age !== null && one.age >= frame.stale_s ? el("span", { class: "muted" }, ago(one.age)) : null)),
    wrong.length > shown.length ? el("li", { class: "muted" }, `and ${wrong.length - shown.length} more`) : null)
      : el("p", { class: "muted" }, "Every region serves and every replica is ready."),
    el("p", { class: "muted hint" }, "Choose a region on the map to see how it places requests and "
      + "where they go."),
  ];
}

export function regionPanel(frame, region) {
  const name = region.region;
  const traffic = frame.tables.traffic.rows.filter((row) => row.of.asked === name);
  const round = Object.entries(region.rtt_s).sort(([, a], [, b]) => a - b);
  return [
    facts([
      ["ready", `${count(region.ready)}/${region.replicas}`],
      ["running", count(region.running)],
      ["pending", count(region.pending)],
      ["held", count(region.held)],
      ["requests/s", rate(region.requests_per_s)],
      ["first token p50", ms(region.ttft_p50_s)],
      ["first token p99", ms(region.ttft_p99_s)],
      ["KV used", percent(region.kv_used_ratio)],
      ["prefix hits", percent(region.prefix_hit_ratio)],
      ["batch lines", region.batch_lines === null ? null : count(region.batch_lines)],
    ], "numbers"),
    region.why_away ? el("p", { class: "error" }, `Its bus is away: ${region.why_away}`) : null,
    region.bus === "none" ? el("p", { class: "muted" }, "This console has no credentials of its bus: "
      + "shown is what peers receive of it.") : null,
    traffic.length ? [el("h3", {}, "Its clients' requests, last minute"), small(frame.tables.traffic, traffic, [0])]
      : null,
    round.length ? [el("h3", {}, "Round trips"), el("p", { class: "chips" },
      round.map(([peer, seconds]) => el("span", { class: "chip" }, `${peer} ${ms(seconds)}`)))] : null,
    el("h3", {}, region.is_own ? "How this router places" : "How it places, by this router's mesh.toml"),
    facts(region.routing.map(([key, value]) => [key, value]), "facts"),
    el("h3", {}, "Operators' orders"),
    orders(frame, region),
  ];
}

function orders(frame, region) {
  const known = region.orders;
  if (known === null) return el("p", { class: "muted" }, "not known");
  const drained = known.all_drained ? "the whole region" : known.drained.join(", ");
  const last = known.command ? `${known.command}, by ${known.by}${known.reason ? `: ${known.reason}` : ""}` : "";
  return el("div", {},
    el("p", {}, drained ? pill("drained", "warning") : null, drained ? ` ${drained}` : "nothing is drained"),
    last ? el("p", { class: "muted" }, `Last: ${last}${known.at ? ` (${ago(frame.at - known.at)} ago)` : ""}`) : null);
}

function small(table, rows, without) {
  const shown = table.columns.map((_, n) => n)
    .filter((n) => !without.includes(n) && rows.some((row) => row.cells[n].trim()));
  return el("div", { class: "scroll" }, el("table", { class: "small" },
    el("thead", {}, el("tr", {}, shown.map((n) => el("th",
      { scope: "col", class: table.columns[n].is_number ? "number" : "" }, table.columns[n].title)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, shown.map((n) => el("td",
      { class: table.columns[n].is_number ? "number" : "" }, row.cells[n])))))));
}

export function changesList(changes) {
  if (!changes.length) return el("p", { class: "muted" }, "No change was ever made.");
  return el("ol", { class: "moments" }, changes.map((one) => el("li", {},
    el("span", { class: "at" }, one.at ? new Date(one.at * 1000).toISOString().replace("T", " ").slice(0, 19) : DASH),
    el("div", {}, el("p", {}, el("strong", {}, one.command || "?"), one.reason ? `: ${one.reason}` : ""),
      el("p", { class: "muted" }, `${one.by}; drained since: `
        + `${one.all_drained ? "all" : one.drained.join(", ") || "none"}`)))));
}

// A replica.

export function replicaDetail(frame, row, fields) {
  const columns = frame.tables.replicas.columns;
  return [
    el("p", { class: "summary" }, pill(row.cells[2], row.level), row.age_s !== null && row.age_s >= frame.stale_s
      ? el("span", { class: "muted" }, ` last heartbeat ${ago(row.age_s)} ago`) : null),
    facts(columns.map((one, n) => [one.title, row.cells[n], one.is_number])
      .filter(([, text, isNumber]) => isNumber && text.trim()), "numbers"),
    el("h3", {}, "Last heartbeat"),
    fields.length ? facts(fields.map(([name, text]) => [name, text]), "facts")
      : el("p", { class: "muted" }, "None was received."),
  ];
}

// A request.

export function requestDetail(life) {
  return [
    el("p", { class: "summary" },
      pill(life.status === null ? life.outcome : `${life.status} ${life.outcome}`, outcomeLevel(life.outcome)),
      ` ${life.summary}`),
    life.parts.length ? waitBar(life) : null,
    facts(Object.entries(life.facts), "facts"),
    el("h3", {}, "What happened"),
    el("ol", { class: "moments" }, life.moments.map(moment)),
    life.left_out ? el("p", { class: "muted" }, `and ${life.left_out} more`) : null,
    life.notes.map((note) => el("p", { class: "muted" }, note)),
  ];
}

const outcomeLevel = (outcome) => (["ok", "open"].includes(outcome) ? "good"
  : ["shed", "client_gone", "refused"].includes(outcome) ? "warning" : "bad");

function waitBar(life) {
  const total = life.waited_s || 1e-9;
  const until = life.has_first_byte ? "to the first byte" : "to its end, without a first byte";
  const known = life.parts.filter((one) => one.seconds > 0);
  return el("figure", { class: "wait" },
    el("figcaption", {}, el("strong", {}, ms(life.waited_s)), ` ${until}, of which`),
    el("div", { class: "stack", role: "img", "aria-label": known.map((one) =>
      `${PARTS[one.name] ?? one.name} ${ms(one.seconds)}`).join(", ") },
    known.map((one) => wide(el("span", { class: `part p-${one.name}` }), one.seconds / total))),
    el("ul", { class: "parts" }, life.parts.map((one) => el("li", {},
      el("span", { class: `key p-${one.name}` }), el("span", { class: "number" }, ms(one.seconds)),
      el("span", {}, el("b", {}, PARTS[one.name] ?? one.name), ` ${one.where}`,
        one.most ? pill("most", "warning") : null)))));
}

function wide(element, share) {
  element.style.width = `${Math.max(0, Math.min(100, share * 100)).toFixed(2)}%`;
  return element;
}

function moment(one) {
  return el("li", {},
    el("span", { class: "at" }, `${one.at_s >= 0 ? "+" : "−"}${Math.abs(one.at_s).toFixed(3)} s`),
    el("div", {},
      el("p", {}, el("span", { class: "who" }, one.who), ` ${one.text}`),
      one.candidates.length ? candidates(one) : null));
}

function candidates(one) {
  const most = Math.max(...one.candidates.map((each) => each.seconds ?? 0), 1e-9);
  const used = TERMS.filter((name) => one.candidates.some((each) => (each.terms[name] ?? 0) >= TINY_S));
  return el("div", { class: "candidates" },
    used.length ? el("p", { class: "terms" }, "price in seconds:",
      used.map((name) => el("span", {}, el("span", { class: `key t-${name}` }), NAMES[name]))) : null,
    el("ul", {}, one.candidates.map((each) => el("li",
      { class: each.chosen ? "chosen" : each.available ? "" : "away" },
      el("span", { class: "what" }, each.name),
      el("div", {},
        each.seconds !== null ? el("div", { class: "stack thin", "aria-hidden": "true" },
          TERMS.filter((name) => (each.terms[name] ?? 0) > 0).map((name) =>
            wide(el("span", { class: `t-${name}` }), each.terms[name] / most))) : null,
        el("span", { class: "text" }, each.text))))),
    one.more ? el("p", { class: "muted" }, `and ${one.more} more`) : null);
}

export function showDialog(title, body) {
  byId("detail-title").textContent = title;
  redrawnFor(byId("detail-actions"), "", () => []);
  redrawn(byId("detail-body"), body);
  const dialog = byId("detail");
  if (!dialog.open) dialog.showModal();
  byId("detail-title").focus();
}
