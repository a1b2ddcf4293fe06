// The map: regions in the order of their longitudes, links with round trips, flows as arrows.

import { arrange, count, ms, percent, rate, svg } from "/dom.js";

const WIDE_PX = 560;
const LABELLED_MAX = 6; // regions, up to which every link has its round trip beside it
const HEIGHT_MAX = 520;
const FLOW_MIN = 0.005; // requests a second

export class RegionMap {
  constructor(element, choose) {
    this.element = element;
    this.choose = choose;
    this.places = new Map();
    this.nodes = new Map(); // region -> its element
    this.below = svg("g");
    element.append(arrowHead(), this.below);
    new ResizeObserver(() => this.redraw()).observe(element.parentElement);
    element.addEventListener("keydown", (event) => this.move(event));
  }

  draw(frame, chosen) {
    this.frame = frame;
    this.chosen = chosen;
    this.redraw();
  }

  redraw() {
    if (!this.frame) return;
    const { regions, traffic } = this.frame;
    const room = this.element.parentElement;
    const width = Math.max(240, room.clientWidth);
    const size = sizes(width, regions.length);
    room.style.minHeight = `${size.height}px`;
    size.height = Math.max(size.height, Math.min(room.clientHeight, HEIGHT_MAX));
    this.places = layout(regions, width, size);
    this.element.setAttribute("viewBox", `0 0 ${width} ${size.height}`);
    this.element.setAttribute("width", width);
    this.element.setAttribute("height", size.height);
    const flows = traffic.filter((one) => one.served && one.served !== one.asked
      && one.requests_per_s > FLOW_MIN && this.places.has(one.served));
    const own = new Map(traffic.filter((one) => one.served === one.asked)
      .map((one) => [one.asked, one.requests_per_s]));
    const most = Math.max(0.1, ...traffic.map((one) => one.requests_per_s ?? 0));
    const [links, roundTrips] = this.links(regions);
    this.below.replaceChildren(...links, ...this.flows(flows, most, size), ...roundTrips);
    const nodes = regions.map((region) => this.node(region, own.get(region.region), size));
    arrange(this.element, [this.element.firstElementChild, this.below, ...nodes]);
  }

  links(regions) {
    const drawn = [], labels = [], rtt = new Map();
    for (const one of regions) {
      for (const [peer, seconds] of Object.entries(one.rtt_s)) {
        const pair = [one.region, peer].sort().join(" ");
        if (this.places.has(peer)) rtt.set(pair, Math.max(rtt.get(pair) ?? 0, seconds));
      }
    }
    for (const [i, a] of regions.entries()) {
      for (const b of regions.slice(i + 1)) {
        const [from, to] = [this.places.get(a.region), this.places.get(b.region)];
        const touches = this.chosen === a.region || this.chosen === b.region;
        const seconds = rtt.get([a.region, b.region].sort().join(" "));
        const known = seconds !== undefined;
        drawn.push(svg("line", { x1: from.x, y1: from.y, x2: to.x, y2: to.y,
          class: `link${touches ? " touched" : ""}${known ? "" : " unknown"}` }));
        if (known && (touches || regions.length <= LABELLED_MAX)) {
          labels.push(svg("text", { x: (from.x + to.x) / 2, y: (from.y + to.y) / 2 + 4,
            class: "rtt" }, ms(seconds).replace(" ", "\u2009")));
        }
      }
    }
    return [drawn, labels];
  }

  // As wide as their share of the busiest flow, that of requests served at home included.
  flows(flows, most, size) {
    const lines = [], labels = [];
    for (const one of flows) {
      const path = between(this.places.get(one.asked), this.places.get(one.served), size);
      if (!path) continue;
      const width = 1.5 + 8 * Math.sqrt(one.requests_per_s / most);
      const faint = this.chosen && this.chosen !== one.asked && this.chosen !== one.served;
      const kind = `flow${one.failed_per_s > FLOW_MIN ? " failing" : ""}${faint ? " faint" : ""}`;
      lines.push(svg("path", { d: path.d, class: kind, "stroke-width": width.toFixed(2),
        "marker-end": "url(#head)" },
      svg("title", {}, `${one.asked} to ${one.served}: ${rate(one.requests_per_s)} requests a second`)));
      if (!faint) labels.push(svg("text", { x: path.label.x, y: path.label.y + 4, class: "per-s" },
        `${rate(one.requests_per_s)}/s`));
    }
    return [...lines, ...labels];
  }

  node(region, own, size) {
    const { x, y } = this.places.get(region.region);
    const [w, h] = [size.nodeWidth, size.nodeHeight];
    const [left, top] = [x - w / 2, y - h / 2];
    const name = region.region;
    const label = `${name}: ${region.state}, bus ${region.bus}, ${count(region.ready)} of `
      + `${region.replicas} replicas ready, ${count(region.running)} running, `
      + `${count(region.held)} held, ${rate(region.requests_per_s)} requests a second`;
    const chosen = this.chosen === name;
    const texts = [
      svg("circle", { cx: left + 15, cy: top + 19, r: 5, class: "state-dot" }),
      svg("text", { x: left + 27, y: top + 24, class: "name" }, clipped(name, size.nameChars)),
      svg("text", { x: left + w - 11, y: top + 24, class: "ready" },
        `${count(region.ready)}/${region.replicas}`),
      svg("text", { x: left + 11, y: top + 42, class: "state" },
        clipped(region.bus === "away" ? `bus away, ${region.state}` : region.state, size.stateChars)),
    ];
    if (size.lines > 2) {
      const work = `${count(region.running)} run · ${count(region.pending)} pend · ${count(region.held)} held`;
      texts.push(svg("text", { x: left + 11, y: top + 60, class: "small" },
        size.lines > 3 ? work : `${count(region.running)} run · ${count(region.held)} held`));
    }
    if (size.lines > 3) {
      texts.push(svg("text", { x: left + 11, y: top + 77, class: "small" },
        `${rate(own ?? null)}/s own · KV ${percent(region.kv_used_ratio)}`));
    }
    const used = Math.max(0, Math.min(1, region.kv_used_ratio ?? 0));
    const node = this.nodeElement(name);
    node.setAttribute("class", `node ${region.level}${chosen ? " chosen" : ""}`);
    node.setAttribute("aria-pressed", String(chosen));
    node.setAttribute("aria-label", label);
    const [box, drawn, cover] = node.children;
    for (const rect of [box, cover]) {
      for (const [key, value] of Object.entries({ x: left, y: top, width: w, height: h, rx: 9 })) {
        rect.setAttribute(key, value);
      }
    }
    drawn.replaceChildren(
      svg("rect", { x: left + 9, y: top + h - 6, width: w - 18, height: 2.5, rx: 1.25, class: "rail" }),
      svg("rect", { x: left + 9, y: top + h - 6, width: (w - 18) * used, height: 2.5, rx: 1.25,
        class: "used" }), ...texts);
    return node;
  }

  // One for each region, for good: what is drawn in it changes below a rectangle that is clicked.
  nodeElement(name) {
    if (!this.nodes.has(name)) {
      this.nodes.set(name, svg("g", { tabindex: 0, role: "button", "data-key": name,
        onclick: () => this.choose(name) }, svg("rect", { class: "box" }), svg("g"),
      svg("rect", { class: "cover" })));
    }
    return this.nodes.get(name);
  }

  move(event) {
    const name = event.target.closest?.("[data-key]")?.dataset.key;
    if (!name) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.choose(name);
      return;
    }
    const ways = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const way = ways[event.key];
    if (!way) return;
    event.preventDefault();
    const from = this.places.get(name);
    let best = null;
    for (const [other, at] of this.places) {
      const ahead = (at.x - from.x) * way[0] + (at.y - from.y) * way[1];
      if (other === name || ahead <= 1) continue;
      const aside = Math.abs((at.x - from.x) * way[1]) + Math.abs((at.y - from.y) * way[0]);
      const far = ahead + 2 * aside;
      if (!best || far < best.far) best = { other, far };
    }
    if (best) this.element.querySelector(`[data-key="${CSS.escape(best.other)}"]`).focus();
  }
}

function sizes(width, regions) {
  const wide = width >= WIDE_PX;
  if (regions <= LABELLED_MAX && wide) {
    return { nodeWidth: 172, nodeHeight: 92, lines: 4, height: 370, nameChars: 13, stateChars: 24 };
  }
  if (regions <= LABELLED_MAX) {
    const nodeWidth = Math.min(124, width * 0.36);
    return { nodeWidth, nodeHeight: 74, lines: 3, height: 300, nameChars: 8, stateChars: 16 };
  }
  const height = wide ? 370 + Math.max(0, regions - 12) * 14 : 260 + regions * 26;
  return { nodeWidth: wide ? 112 : 92, nodeHeight: 54, lines: 2, height, nameChars: 8, stateChars: 14 };
}

function layout(regions, width, size) {
  const places = new Map();
  const ordered = [...regions].sort((a, b) => (a.location?.[1] ?? 0) - (b.location?.[1] ?? 0)
    || a.region.localeCompare(b.region));
  const n = ordered.length;
  const margin = 6;
  const rx = Math.min(width / 2 - size.nodeWidth / 2 - margin, 420);
  const ry = size.height / 2 - size.nodeHeight / 2 - margin;
  // The middle one is on top; an odd number of regions leaves the lowest part empty.
  const low = n === 1 ? 0 : Math.sin(((270 - (180 * (n - 1)) / n) * Math.PI) / 180);
  const [up, span] = [-1, (n === 1 ? 0 : Math.max(low, 0)) + 1];
  ordered.forEach((region, i) => {
    const angle = ((270 - (180 * (n - 1)) / n + (360 * i) / n) * Math.PI) / 180;
    const x = n === 1 ? width / 2 : width / 2 + rx * widened(Math.cos(angle), n);
    const y = n <= 2 ? size.height / 2
      : margin + size.nodeHeight / 2 + (2 * ry * (Math.sin(angle) - up)) / span;
    places.set(region.region, { x, y });
  });
  return places;
}

// Three regions use the whole width.
const widened = (cosine, n) => (n === 3 ? Math.sign(Math.round(cosine * 9)) * (Math.abs(cosine) > 0.1 ? 1 : 0) : cosine);

// A line beside the link, from box to box; the other direction is on the other side.
function between(from, to, size) {
  const [dx, dy] = [to.x - from.x, to.y - from.y];
  const far = Math.hypot(dx, dy);
  if (far < 1) return null;
  const [nx, ny] = [-dy / far, dx / far];
  const aside = size.lines > 3 ? 13 : 9;
  const a = leaving({ x: from.x + nx * aside, y: from.y + ny * aside }, dx, dy, from, size, 3);
  const b = leaving({ x: to.x + nx * aside, y: to.y + ny * aside }, -dx, -dy, to, size, 11);
  if ((b.x - a.x) * dx + (b.y - a.y) * dy <= 0) return null;
  const label = { x: a.x + (b.x - a.x) * 0.3 + nx * 15, y: a.y + (b.y - a.y) * 0.3 + ny * 12 };
  return { d: `M${a.x.toFixed(1)} ${a.y.toFixed(1)}L${b.x.toFixed(1)} ${b.y.toFixed(1)}`, label };
}

function leaving(start, dx, dy, centre, size, gap) {
  const far = Math.hypot(dx, dy);
  const [ux, uy] = [dx / far, dy / far];
  const [hw, hh] = [size.nodeWidth / 2 + gap, size.nodeHeight / 2 + gap];
  const tx = ux ? ((ux > 0 ? hw : -hw) - (start.x - centre.x)) / ux : Infinity;
  const ty = uy ? ((uy > 0 ? hh : -hh) - (start.y - centre.y)) / uy : Infinity;
  const t = Math.min(tx, ty);
  return { x: start.x + ux * t, y: start.y + uy * t };
}

function arrowHead() {
  return svg("defs", {}, svg("marker", { id: "head", viewBox: "0 0 8 8", refX: 2.5, refY: 4,
    markerWidth: 9, markerHeight: 9, markerUnits: "userSpaceOnUse", orient: "auto" },
  svg("path", { d: "M0 0 8 4 0 8z", class: "head" })));
}

const clipped = (text, chars) => (text.length > chars ? `${text.slice(0, chars - 1)}…` : text);
