// A table with sortable columns, a row that has the keyboard, and as many columns as fit.

import { arrange, el, setText } from "/dom.js";

const ROWS_MAX = 500; // in the page; the filter finds the others
const PAGE_ROWS = 10;

export class Table {
  // `open` gets the row that Enter or a click chose.
  constructor(element, open) {
    this.element = element;
    this.open = open;
    this.rows = new Map(); // key -> its element and texts
    this.hidden = new Set(); // numbers of columns that do not fit
    this.sortedBy = null; // {column, down}; null: as the order says
    this.current = null;
    element.setAttribute("role", "grid");
    element.append(el("thead"), el("tbody"));
    element.addEventListener("keydown", (event) => this.move(event));
    new ResizeObserver(() => this.refit()).observe(element.parentElement);
  }

  draw(table, rows) {
    const titles = table.columns.map((one) => one.title).join("|");
    if (titles !== this.titles) {
      this.titles = titles;
      this.hidden.clear();
      this.columns = table.columns;
    }
    this.columns = table.columns;
    this.blank = this.columns.map((_, n) => rows.length > 0 && rows.every((row) => !row.cells[n].trim()));
    this.shown = this.sorted(rows).slice(0, ROWS_MAX);
    this.render();
    this.fit();
  }

  sorted(rows) {
    if (!this.sortedBy) return rows;
    const number = this.columns.findIndex((one) => one.title === this.sortedBy.column);
    if (number < 0) return rows;
    const sign = this.sortedBy.down ? -1 : 1;
    const missing = (value) => value === null || value === "";
    return [...rows].sort((a, b) => {
      const [x, y] = [a.values[number], b.values[number]];
      if (missing(x) || missing(y)) return missing(x) - missing(y);
      return sign * (typeof x === "number" && typeof y === "number" ? x - y
        : String(x).localeCompare(String(y)));
    });
  }

  visible() {
    return this.columns.map((_, n) => n).filter((n) => !this.hidden.has(n) && !this.blank[n]);
  }

  render() {
    const visible = this.visible();
    const signature = `${visible.join()} ${JSON.stringify(this.sortedBy)}`;
    if (signature !== this.signature) {
      this.signature = signature;
      this.rows.clear();
      this.head(visible);
    }
    const body = this.element.tBodies[0];
    const had = body.contains(document.activeElement);
    const wanted = this.shown.map((row) => this.rowElement(row, visible));
    const keys = new Set(this.shown.map((row) => row.key));
    for (const key of this.rows.keys()) if (!keys.has(key)) this.rows.delete(key);
    arrange(body, wanted);
    if (!keys.has(this.current)) this.current = this.shown[0]?.key ?? null;
    for (const [key, { element }] of this.rows) {
      const tabindex = key === this.current ? "0" : "-1";
      if (element.getAttribute("tabindex") !== tabindex) element.setAttribute("tabindex", tabindex);
    }
    if (had && !body.contains(document.activeElement)) {
      this.rows.get(this.current)?.element.focus({ preventScroll: true });
    }
    if (!this.shown.length) {
      body.replaceChildren(el("tr", { class: "empty" },
        el("td", { colspan: Math.max(1, visible.length) }, "nothing here")));
    }
  }

  head(visible) {
    const cells = visible.map((n) => {
      const one = this.columns[n];
      const by = this.sortedBy?.column === one.title ? this.sortedBy : null;
      const order = by ? (by.down ? "descending" : "ascending") : "none";
      return el("th", { scope: "col", class: one.is_number ? "number" : "", "aria-sort": order },
        el("button", { type: "button", id: `${this.element.id}-${n}`, onclick: () => this.sort(one) },
          one.title, el("span", { class: "mark", "aria-hidden": "true" },
            by ? (by.down ? " ▾" : " ▴") : "")));
    });
    const focused = document.activeElement?.id;
    this.element.tHead.replaceChildren(el("tr", {}, cells));
    if (focused?.startsWith(`${this.element.id}-`)) document.getElementById(focused)?.focus();
  }

  // First the way that is wanted more often: the most of a number, the first of names.
  sort(column) {
    const first = Boolean(column.is_number);
    if (this.sortedBy?.column !== column.title) this.sortedBy = { column: column.title, down: first };
    else if (this.sortedBy.down === first) this.sortedBy = { column: column.title, down: !first };
    else this.sortedBy = null;
    this.onsort?.();
  }

  rowElement(row, visible) {
    let known = this.rows.get(row.key);
    if (!known) {
      const element = el("tr", { tabindex: "-1", "data-key": row.key, onclick: () => this.choose(row.key) },
        visible.map((n) => el(n === visible[0] ? "th" : "td", {
          scope: n === visible[0] ? "row" : null,
          class: `${this.columns[n].is_number ? "number" : ""} c-${this.columns[n].title.replaceAll(" ", "-")}` })));
      known = { element };
      this.rows.set(row.key, known);
    }
    known.row = row;
    const kind = `row ${row.level}`;
    if (known.element.className !== kind) known.element.className = kind;
    visible.forEach((n, place) => {
      const cell = known.element.children[place];
      setText(cell, row.cells[n]);
      if (row.cells[n].length > 24 && cell.title !== row.cells[n]) cell.title = row.cells[n];
    });
    return known.element;
  }

  // Columns that matter least go first; the first one stays.
  fit() {
    const room = this.element.parentElement.clientWidth;
    for (let left = this.columns.length; left > 1 && this.element.scrollWidth > room + 1; left -= 1) {
      const candidates = this.visible().slice(1);
      if (!candidates.length) return;
      const least = candidates.reduce((a, b) => (this.columns[b].keep <= this.columns[a].keep ? b : a));
      this.hidden.add(least);
      this.render();
    }
  }

  refit() {
    const room = this.element.parentElement.clientWidth;
    if (!this.columns || room === this.room) return;
    this.room = room;
    this.hidden.clear();
    this.render();
    this.fit();
  }

  choose(key) {
    const known = this.rows.get(key);
    if (!known) return;
    this.setCurrent(key);
    this.open(known.row);
  }

  setCurrent(key) {
    this.rows.get(this.current)?.element.setAttribute("tabindex", "-1");
    this.current = key;
    this.rows.get(key)?.element.setAttribute("tabindex", "0");
  }

  focus() {
    (this.rows.get(this.current)?.element ?? this.element.querySelector("button"))?.focus();
  }

  move(event) {
    const at = event.target.closest?.("tbody tr[data-key]");
    if (!at) {
      if (event.key === "ArrowDown" && this.shown?.length) {
        event.preventDefault();
        this.focus();
      }
      return;
    }
    const number = this.shown.findIndex((row) => row.key === at.dataset.key);
    const last = this.shown.length - 1;
    const steps = { ArrowDown: number + 1, ArrowUp: number - 1, j: number + 1, k: number - 1, Home: 0,
      End: last, PageDown: number + PAGE_ROWS, PageUp: number - PAGE_ROWS };
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.choose(at.dataset.key);
    } else if (event.key in steps && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      const next = this.shown[Math.max(0, Math.min(last, steps[event.key]))];
      this.setCurrent(next.key);
      this.rows.get(next.key).element.focus();
    }
  }
}
