// The admin key and what is ordered with it. The key stays in this tab: sessionStorage ends with it.

import { byId, el } from "/dom.js";

const KEY = "mesh-admin-key", NAME = "mesh-admin-name";
const WHAT = {
  drain: "It finishes what it has and takes nothing new, until it is undrained. This page says when nothing runs there any more.",
  cordon: "It takes nothing new, until it is undrained. What it has it finishes.",
  undrain: "It takes work again.",
};

export class Access {
  constructor(say, changed) {
    this.say = say;
    this.changed = changed;
    this.canChange = [];
    this.key = sessionStorage.getItem(KEY);
    this.name = sessionStorage.getItem(NAME) ?? "";
    byId("access").addEventListener("click", () => this.show());
    byId("access-form").addEventListener("submit", (event) => this.unlock(event));
    byId("lock").addEventListener("click", () => this.lock());
    byId("order-form").addEventListener("submit", (event) => this.send(event));
    this.draw();
  }

  update(frame) {
    this.canChange = frame.can_change;
    this.draw();
  }

  may(region) {
    return this.key !== null && this.canChange.includes(region);
  }

  draw() {
    const button = byId("access");
    const text = this.key === null ? "Read-only" : "May change";
    if (button.textContent !== text) button.textContent = text;
    button.classList.toggle("unlocked", this.key !== null);
  }

  show() {
    const possible = this.canChange.length > 0;
    byId("access-text").textContent = !possible
      ? "This console is read-only: its router was started without an admin key. `mesh drain` changes the same."
      : this.key !== null ? `Unlocked: replicas of ${this.canChange.join(", ")} can be drained here.`
        : `With the admin key, replicas of ${this.canChange.join(", ")} can be drained here. The key stays in this tab.`;
    byId("access-form").hidden = !possible || this.key !== null;
    byId("lock-actions").hidden = this.key === null;
    byId("access-error").textContent = "";
    byId("key").value = "";
    byId("name").value = this.name;
    byId("access-dialog").showModal();
  }

  async unlock(event) {
    event.preventDefault();
    const key = byId("key").value.trim();
    const answer = await ask("/api/key", key, "{}");
    if (!answer.ok) {
      byId("access-error").textContent = answer.error;
      return;
    }
    [this.key, this.name] = [key, byId("name").value.trim()];
    sessionStorage.setItem(KEY, key);
    sessionStorage.setItem(NAME, this.name);
    byId("access-dialog").close();
    this.draw();
    this.changed();
    this.say("Unlocked: replicas and regions can be drained.");
  }

  lock() {
    this.key = null;
    sessionStorage.removeItem(KEY);
    byId("access-dialog").close();
    this.draw();
    this.changed();
  }

  // The buttons for a region or one of its replicas.
  actions(region, replica, drained) {
    if (!this.may(region)) {
      const why = this.canChange.includes(region) ? "Read-only: unlock with the admin key to drain it."
        : "Read-only here.";
      return [el("p", { class: "muted" }, why)];
    }
    const verbs = drained ? ["undrain"] : ["drain", "cordon"];
    return verbs.map((verb) => el("button", { type: "button", id: `${replica ? "replica" : "region"}-${verb}`,
      class: verb === "drain" ? "main" : "", onclick: () => this.ask(verb, region, replica) },
    verb[0].toUpperCase() + verb.slice(1)));
  }

  ask(verb, region, replica) {
    this.order = { verb, region, replica };
    const what = replica ? `replica ${replica} of ${region}` : `all of region ${region}`;
    const title = `${verb[0].toUpperCase() + verb.slice(1)} ${what}`;
    byId("order-title").textContent = title;
    byId("order-go").textContent = title;
    byId("order-text").textContent = WHAT[verb];
    byId("order-error").textContent = "";
    byId("reason").value = "";
    byId("order-dialog").showModal();
    byId("reason").focus();
  }

  async send(event) {
    event.preventDefault();
    if (this.sending) return;
    this.sending = true;
    const order = { ...this.order, reason: byId("reason").value.trim(), name: this.name };
    const answer = await ask("/api/orders", this.key, JSON.stringify(order));
    this.sending = false;
    if (!answer.ok) {
      byId("order-error").textContent = answer.error;
      return;
    }
    byId("order-dialog").close();
    this.say(`Ordered: ${answer.command}.`);
    this.changed(order);
  }

  async history(region) {
    return ask(`/api/changes?region=${encodeURIComponent(region)}`, this.key);
  }
}

// `body`: undefined for a question.
export async function ask(path, key, body) {
  const headers = { authorization: `Bearer ${key}` };
  if (body !== undefined) headers["content-type"] = "application/json";
  try {
    const answer = await fetch(path, { method: body === undefined ? "GET" : "POST", headers, body,
      credentials: "omit", redirect: "error", cache: "no-store" });
    return { ok: answer.ok, status: answer.status, ...(await answer.json()) };
  } catch {
    return { ok: false, error: "the router does not answer" };
  }
}
