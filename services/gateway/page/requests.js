// The newest requests, and how one of them went.

import { byId, count, duration, el, plural, svg, text, width } from "./format.js";
import { HttpError, request } from "./connection.js";

const MAX_SHOWN = 60;
const LABELS = { queued: "queued", placing: "placed", prefilling: "computing the prompt", handing_off: "handing off", decoding: "decoding", done: "ended" };

export class Requests {
  constructor() {
    this.list = byId("requests");
    this.note = byId("requests-note");
    this.running = [];
    this.ended = [];
    this.rows = new Map();
    this.timeline = new Timeline();
  }

  showRunning(snapshot) {
    this.running = snapshot.running;
    const { flow } = snapshot;
    const total = flow.queued + flow.placing + flow.prefilling + flow.handing_off + flow.decoding;
    text(this.note, total > this.running.length ? `the newest ${this.running.length} of ${count(total)} running` : total ? `${count(total)} running` : "");
  }

  addEnded(rows) {
    const known = new Set(this.ended.map((row) => row.number));
    this.ended = [...rows.filter((row) => !known.has(row.number)).reverse(), ...this.ended].slice(0, MAX_SHOWN);
    this.draw();
  }

  reset() {
    this.ended = [];
  }

  draw() {
    const shown = [...this.running, ...this.ended].slice(0, MAX_SHOWN);
    const wanted = new Map();
    for (const one of shown) wanted.set(one.name, this.rows.get(one.name) ?? this.row(one.name));
    const order = [...wanted.keys()].join(" ");
    this.rows = wanted;
    if (shown.length && order !== this.order) {
      const focused = document.activeElement?.closest?.(".request")?.dataset.name;
      this.list.replaceChildren(...[...wanted.values()].map((row) => row.root));
      wanted.get(focused)?.root.focus();
    }
    this.order = order;
    for (const one of shown) this.fill(wanted.get(one.name), one);
  }

  row(name) {
    const state = el("span"), part = el("i"), tokens = el("span", { class: "n" }), ttft = el("span", { class: "n muted" });
    const root = el("button", { type: "button", class: "request", "data-name": name, onclick: () => this.choose(name) },
      el("span", { class: "mono" }, name), state, el("span", { class: "track" }, part), tokens, ttft);
    return { root, state, part, tokens, ttft };
  }

  fill(row, one) {
    const word = one.finish === "error" ? (one.code === "request_cancelled" || one.code === "cancelled" ? "cancelled" : "error") : one.finish || one.state;
    text(row.state, word.replace("_", " "));
    row.state.className = `state ${word}`;
    text(row.tokens, plural(one.tokens, "tok").replace("toks", "tok"));
    text(row.ttft, duration(one.first_token_ms));
    width(row.part, one.tokens / one.max_tokens);
    row.root.setAttribute("aria-pressed", String(this.timeline.name === one.name));
    row.root.title = one.code || "";
  }

  choose(name) {
    this.timeline.choose(name);
    this.draw();
  }
}

class Timeline {
  constructor() {
    this.box = byId("timeline");
    this.name = "";
    this.progress = [];
    this.abort = new AbortController();
  }

  async choose(name) {
    this.abort.abort();
    const abort = (this.abort = new AbortController());
    this.name = name;
    this.progress = [];
    let misses = 0;
    while (!abort.signal.aborted) {
      try {
        const row = await (await request(`dashboard/requests/${encodeURIComponent(name)}`, { signal: abort.signal })).json();
        this.progress.push([row.age_ms, row.tokens]);
        this.draw(row);
        if (row.finish) return;
      } catch (error) {
        if (abort.signal.aborted) return;
        misses += 1;
        if (misses > 3 && this.progress.length === 0) {
          this.box.replaceChildren(el("p", { class: "empty" }, error instanceof HttpError ? error.message : "The gateway does not answer."));
          return;
        }
      }
      await new Promise((resolve) => setTimeout(resolve, 500));
    }
  }

  draw(row) {
    const steps = row.steps.map(([at, state, attempt, prefill, decode, reason]) => ({ at, state, attempt, prefill, decode, reason }));
    const end = Math.max(row.age_ms, 1);
    const W = 600, top = 44, h = 22;
    const x = (ms) => (Math.min(ms, end) / end) * W;
    const parts = [];
    steps.forEach((step, index) => {
      const until = steps[index + 1]?.at ?? end;
      parts.push(svg("rect", { class: `t-${step.state}`, x: x(step.at), y: top, width: Math.max(x(until) - x(step.at), 1.5), height: h }, svg("title", {}, `${LABELS[step.state]}: ${duration(until - step.at)}`)));
      if (index && step.state === "queued") parts.push(svg("line", { class: "t-resume", x1: x(step.at), x2: x(step.at), y1: top - 8, y2: top + h + 8 }));
    });
    if (row.first_token_ms !== null) {
      const at = x(row.first_token_ms);
      parts.push(svg("line", { class: "t-first", x1: at, x2: at, y1: top - 8, y2: top + h + 8 }));
      const known = [[row.first_token_ms, 1], ...this.progress.filter(([ms, tokens]) => tokens > 1 && ms > row.first_token_ms)];
      const most = Math.max(row.tokens, 1);
      parts.push(svg("path", { class: "t-tokens", d: known.map(([ms, tokens], index) => `${index ? "L" : "M"}${x(ms).toFixed(1)} ${(top - 8 - (tokens / most) * 30).toFixed(1)}`).join("") }));
      parts.push(svg("text", { x: W, y: -2, "text-anchor": "end" }, plural(row.tokens, "token")));
    }
    for (const share of [0, 0.5, 1]) parts.push(svg("text", { x: share * W, y: top + h + 24, "text-anchor": share === 0 ? "start" : share === 1 ? "end" : "middle" }, duration(share * end)));
    const picture = svg("svg", { viewBox: `0 -14 ${W} ${top + h + 44}`, role: "img", "aria-label": `Timeline of ${row.name}; its steps follow` }, ...parts);
    const items = steps.map((step, index) => ({
      at: step.at,
      text: step.state === "queued" && index ? `queued again after ${step.reason || "an error"}` : `${LABELS[step.state]}${this.where(step, steps[index - 1])}`,
      resumed: step.state === "queued" && index > 0,
    }));
    if (row.first_token_ms !== null) items.push({ at: row.first_token_ms, text: "first token" });
    if (row.finish) items.push({ at: row.age_ms, text: `ended: ${row.finish === "error" ? row.code : row.finish}` });
    items.sort((a, b) => a.at - b.at);
    const attempts = Math.max(...steps.map((step) => step.attempt));
    const facts = [row.model, `${plural(row.prompt_tokens, "prompt token")}, ${count(row.cached_tokens)} cached`, `${plural(row.tokens, "token")} of at most ${count(row.max_tokens)}`, plural(attempts, "attempt")];
    this.box.replaceChildren(el("div", { class: "timeline" },
      el("h3", { class: "mono" }, row.name), el("p", { class: "facts" }, facts.join(" · ")), picture,
      el("ol", { class: "steps" }, ...items.map((item) => el("li", { class: item.resumed ? "resumed" : "" }, el("time", {}, `+${duration(item.at)}`), el("span", {}, item.text))))));
  }

  where(step, before) {
    const at = step.state === "decoding" ? step.decode : step.prefill ? `${step.prefill}${step.decode ? ` → ${step.decode}` : ""}` : step.decode;
    const repeated = before && before.prefill === step.prefill && before.decode === step.decode && step.state !== "decoding";
    return at && !repeated ? ` on ${at}` : "";
  }
}
