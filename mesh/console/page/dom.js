// Makes elements. Texts come from the bus: they become text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

export const byId = (id) => document.getElementById(id);

// Set only what differs, so that a frame that changes nothing costs nothing.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Put these elements there in this order. Those that are there already stay where they can: an
// element that is taken out loses the keyboard, and a click that has begun on it.
export function arrange(parent, wanted) {
  const keep = new Set(wanted);
  for (const child of [...parent.children]) if (!keep.has(child)) child.remove();
  wanted.forEach((element, n) => {
    if (parent.children[n] !== element) parent.insertBefore(element, parent.children[n] ?? null);
  });
}

// Draw anew only what differs from the last time.
export function redrawn(parent, children) {
  const fresh = children.flat(Infinity).filter((child) => child);
  const same = fresh.length === parent.childNodes.length
    && fresh.every((child, n) => child.isEqualNode(parent.childNodes[n]));
  if (!same) parent.replaceChildren(...fresh);
}

// The same for buttons, whose look does not say what they do.
export function redrawnFor(parent, what, make) {
  if (parent.dataset.what === what) return;
  parent.dataset.what = what;
  parent.replaceChildren(...make());
}

export const DASH = "–";
export const ms = (seconds) => (seconds === null || seconds === undefined ? DASH
  : seconds >= 10 ? `${seconds.toFixed(1)} s` : `${Math.round(seconds * 1000)} ms`);
export const percent = (ratio) => (ratio === null ? DASH : `${Math.round(ratio * 100)}%`);
export const rate = (perS) => (perS === null ? DASH
  : perS.toFixed(perS > 0 && perS < 0.095 ? 2 : perS < 100 ? 1 : 0));
export const count = (value) => (value === null || value === undefined ? DASH : String(value));
export function ago(seconds) {
  if (seconds === null || seconds === undefined) return DASH;
  if (seconds < 120) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}
