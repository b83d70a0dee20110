// Pools as squares, KV by tier, and the list of workers.

import { byId, count, el, percent, plural, text, width } from "./format.js";

const HEIGHT_LIMIT = 120;
const NAMES = { gateway: "Gateways", prefill: "Prefill", decode: "Decode", draft: "Draft", kvstore: "KV store" };
const TIERS = { prefill: "Prefill workers", decode: "Decode workers", kvstore: "KV stores, host memory" };

const nameOf = (pool, pools, names) =>
  pools.filter((other) => other.role === pool.role).length > 1 ? `${names[pool.role]} · ${pool.model || "no model"}` : names[pool.role];

// Squares of one pool on a canvas: thousands of elements would be slow.
function drawMarks(canvas, marks) {
  const style = getComputedStyle(canvas);
  const color = (name) => style.getPropertyValue(name).trim();
  const ratio = devicePixelRatio || 1;
  const w = canvas.clientWidth;
  if (!w) return;
  let cell = 22;
  while (cell > 4 && Math.ceil(marks.length / Math.floor(w / cell)) * cell > HEIGHT_LIMIT) cell -= 1;
  const columns = Math.max(1, Math.floor(w / cell));
  const h = Math.ceil(marks.length / columns) * cell;
  canvas.style.height = `${h}px`;
  canvas.width = Math.round(w * ratio);
  canvas.height = Math.round(h * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const role = color("--role"), bad = color("--bad"), warn = color("--warn"), faint = color("--faint");
  const gap = cell > 10 ? 3 : 1;
  const square = (x, y) => {
    context.beginPath();
    context.roundRect(x, y, cell - gap, cell - gap, cell > 10 ? 3 : 1);
  };
  [...marks].forEach((mark, index) => {
    const x = (index % columns) * cell, y = Math.floor(index / columns) * cell;
    square(x, y);
    const load = "0123456789".indexOf(mark);
    context.globalAlpha = load >= 0 ? 0.25 + (load / 9) * 0.75 : mark === "o" || mark === "s" || mark === "u" ? 0.5 : 1;
    context.fillStyle = load >= 0 ? role : mark === "q" || mark === "x" ? bad : mark === "d" ? warn : mark === "u" ? role : faint;
    context.fill();
    if (load < 0 && mark !== "u") {  // not by colour alone
      context.globalAlpha = 1;
      context.strokeStyle = context.fillStyle;
      context.lineWidth = 1;
      square(x, y);
      context.stroke();
    }
  });
}

export class Pools {
  constructor() {
    this.box = byId("pools");
    this.tiers = byId("tiers");
    this.pools = [];
    this.cards = new Map();
    this.meters = new Map();
    new ResizeObserver(() => this.redraw()).observe(this.box);
  }

  show(pools) {
    this.pools = pools;
    const shown = pools.filter((pool) => pool.role !== "gateway");
    this.keep(this.box, this.cards, shown, () => this.card(), "No worker has been heard yet.");
    for (const pool of shown) {
      const card = this.cards.get(`${pool.role} ${pool.model}`);
      text(card.name, nameOf(pool, shown, NAMES));
      const facts = [`${count(pool.ready)} of ${plural(pool.workers, "worker")} ready`, `${count(pool.running)} running`];
      if (pool.waiting) facts.push(`${count(pool.waiting)} waiting`);
      if (pool.role !== "kvstore") facts.push(`${plural(pool.credits, "credit")} left`);
      if (pool.role === "prefill" && pool.prefill_tokens_per_s) facts.push(`${count(pool.prefill_tokens_per_s)} tokens/s`);
      if (pool.role !== "prefill" && pool.tokens_per_s) facts.push(`${count(pool.tokens_per_s)} tokens/s`);
      text(card.facts, facts.join(" · "));
      text(card.trouble, pool.troubled ? `${count(pool.troubled)} unwell` : "");
      card.canvas.setAttribute("aria-label", `${pool.workers} ${NAMES[pool.role]}, ${pool.troubled} unwell`);
      card.root.className = `pool ${pool.role}`;
    }
    this.redraw();
    const withKv = shown.filter((pool) => pool.kv[0] > 0 || pool.role === "kvstore");
    this.keep(this.tiers, this.meters, withKv, () => this.meter(), "No KV yet.");
    for (const pool of withKv) {
      const meter = this.meters.get(`${pool.role} ${pool.model}`);
      const [total, ...parts] = pool.kv;
      text(meter.name, nameOf(pool, withKv, TIERS));
      text(meter.facts, !total ? "nothing stored yet" : `${percent((parts[0] + parts[1]) / total)} in use · ${percent(parts[2] / total)} cached · ${count(total)} blocks`);
      meter.parts.forEach((part, index) => width(part, total ? parts[index] / total : 0));
    }
  }

  redraw() {
    for (const pool of this.pools) {
      const card = this.cards.get(`${pool.role} ${pool.model}`);
      if (card) drawMarks(card.canvas, pool.marks);
    }
  }

  card() {
    const name = el("b"), facts = el("span"), trouble = el("span", { class: "bad" }), canvas = el("canvas", { role: "img" });
    const root = el("div", {}, el("div", { class: "head" }, name, el("span", { class: "facts" }, facts, " ", trouble)), canvas);
    return { root, name, facts, trouble, canvas };
  }

  meter() {
    const name = el("b"), facts = el("span", { class: "facts" });
    const parts = ["owned", "leased", "cached"].map((kind) => el("i", { class: `q-${kind}` }));
    const root = el("div", { class: "tier" }, el("div", { class: "head" }, name, facts), el("div", { class: "meter", "aria-hidden": "true" }, ...parts));
    return { root, name, facts, parts };
  }

  // One element of `known` for each pool, in their order.
  keep(box, known, pools, make, nothing) {
    const keys = pools.map((pool) => `${pool.role} ${pool.model}`);
    const changed = keys.length !== known.size || keys.some((key, index) => [...known.keys()][index] !== key);
    if (!changed) return;
    const old = new Map(known);
    known.clear();
    for (const key of keys) known.set(key, old.get(key) ?? make());
    box.replaceChildren(...(keys.length ? [...known.values()].map((one) => one.root) : [el("p", { class: "empty" }, nothing)]));
  }
}

export class Workers {
  constructor(onSearch) {
    this.body = byId("workers").tBodies[0];
    this.note = byId("workers-note");
    this.rows = new Map();
    let timer = 0;
    byId("search").addEventListener("input", (event) => {
      clearTimeout(timer);
      timer = setTimeout(() => onSearch(event.target.value.trim()), 250);
    });
  }

  show({ known, matching, rows }) {
    text(this.note, matching > rows.length ? `${rows.length} of ${count(matching)}: search for others` : matching < known ? `${count(matching)} of ${count(known)}` : count(known));
    const wanted = new Map();
    for (const worker of rows) wanted.set(worker.id, this.rows.get(worker.id) ?? this.row(worker.id));
    const same = wanted.size === this.rows.size && [...wanted.keys()].every((id, index) => this.body.rows[index]?.dataset.id === id);
    this.rows = wanted;
    if (!same) this.body.replaceChildren(...[...wanted.values()].map((row) => row.root));
    for (const worker of rows) this.fill(wanted.get(worker.id), worker);
  }

  row(id) {
    const cells = Object.fromEntries(["running", "waiting", "credits", "speed", "step"].map((name) => [name, el("td", { class: "n" })]));
    const who = el("span", { class: "who mono" }, id), state = el("span"), load = el("i"), loadText = el("span", { class: "muted" });
    const kv = ["owned", "leased", "cached"].map((kind) => el("i", { class: `q-${kind}` }));
    const meter = el("div", { class: "meter" }, ...kv);
    const root = el("tr", { "data-id": id }, el("th", { scope: "row" }, who), el("td", {}, state), el("td", {}, el("span", { class: "track", "aria-hidden": "true" }, load), " ", loadText),
      cells.running, cells.waiting, cells.credits, el("td", {}, meter), cells.speed, cells.step);
    return { root, state, load, loadText, kv, meter, ...cells };
  }

  fill(row, worker) {
    if (row.root.className !== worker.role) row.root.className = worker.role;
    const word = worker.state === "starting" && worker.loaded > 0 && worker.loaded < 1 ? `starting ${percent(worker.loaded)}`
      : worker.state !== "ready" ? worker.state : worker.health && worker.health !== "ok" ? worker.health : "ready";
    text(row.state, word);
    row.state.className = `state ${worker.state !== "ready" ? worker.state : worker.health || "ready"}`;
    width(row.load, worker.load);
    text(row.loadText, percent(worker.load));
    text(row.running, count(worker.running));
    text(row.waiting, count(worker.waiting));
    text(row.credits, worker.role === "gateway" || worker.role === "kvstore" ? "" : count(worker.credits));
    const [total, ...parts] = worker.kv;
    row.meter.hidden = !total;
    row.meter.title = total ? `${count(parts[0])} in use, ${count(parts[1])} leased, ${count(parts[2])} cached of ${count(total)} blocks` : "";
    row.kv.forEach((part, index) => width(part, total ? parts[index] / total : 0));
    text(row.speed, worker.tokens_per_s || worker.prefill_tokens_per_s ? count(worker.role === "prefill" ? worker.prefill_tokens_per_s : worker.tokens_per_s) : "");
    text(row.step, worker.step_ms ? `${worker.step_ms.toFixed(1)} ms` : "");
  }
}
