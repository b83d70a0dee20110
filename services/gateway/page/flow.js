// Requests on their way: gateway → prefill → decode, beside them draft and kvstore. Pipes whose water runs faster the more there is.

import { count, plural, svg, text } from "./format.js";

const WIDE = {
  view: "0 0 980 272",
  nodes: { gateway: [10, 104], prefill: [300, 104], decode: [590, 104], draft: [820, 114], kvstore: [445, 204] },
  size: [150, 84], small: [150, 64],
  pipes: {
    ask: "M160 146H300", handoff: "M450 146H590", direct: "M120 104C165 50 580 50 630 104", tokens: "M690 104C665 -20 95 -20 70 104",
    draft: "M740 146H820", prefillKv: "M375 188C375 222 400 236 445 236", decodeKv: "M665 188C665 222 640 236 595 236",
  },
  labels: { ask: [230, 134], handoff: [520, 134], direct: [375, 86], tokens: [380, 34] },
};
const NARROW = {
  view: "0 0 340 420",
  nodes: { gateway: [20, 10], prefill: [20, 150], decode: [20, 290], draft: [200, 230], kvstore: [200, 330] },
  size: [140, 84], small: [124, 64],
  pipes: {
    ask: "M80 94V150", handoff: "M80 234V290", direct: "M160 40C215 60 210 210 140 290", tokens: "M20 330C-2 300 -2 90 20 60",
    draft: "M160 310C180 310 180 262 200 262", prefillKv: "M160 192C190 200 180 350 200 355", decodeKv: "M160 345C180 345 180 365 200 365",
  },
  labels: { ask: [118, 127], handoff: [118, 267], direct: [240, 110], tokens: [64, 404] },
};
const ROLE_OF = { ask: "gateway", handoff: "prefill", direct: "gateway", tokens: "decode", draft: "draft", prefillKv: "kvstore", decodeKv: "kvstore" };
const NAMES = { gateway: "Gateway", prefill: "Prefill", decode: "Decode", draft: "Draft", kvstore: "KV store" };

export class Flow {
  constructor(box) {
    this.box = box;
    this.layout = null;
    new ResizeObserver(() => this.arrange()).observe(box);
    this.arrange();
  }

  arrange() {
    const layout = this.box.clientWidth < 560 ? NARROW : WIDE;
    if (layout === this.layout) return;
    this.layout = layout;
    this.pipes = {};
    this.nodes = {};
    this.labels = {};
    const parts = [];
    for (const [name, path] of Object.entries(layout.pipes)) {
      const main = ["ask", "handoff", "direct", "tokens"].includes(name);
      parts.push(svg("path", { class: "pipe", d: path, "stroke-width": main ? 9 : 6 }));
      this.pipes[name] = svg("path", { class: `water ${ROLE_OF[name]}`, d: path, "stroke-width": main ? 4 : 3 });
      parts.push(this.pipes[name]);
    }
    for (const [name, [x, y]] of Object.entries(layout.labels)) {
      this.labels[name] = svg("text", { class: "edge-label", x, y, "text-anchor": "middle" });
      parts.push(this.labels[name]);
    }
    for (const [name, [x, y]] of Object.entries(layout.nodes)) {
      const small = name === "draft" || name === "kvstore";
      const [w, h] = small ? layout.small : layout.size;
      const number = svg("text", { class: "count", x: w - 14, y: small ? 38 : 46, "text-anchor": "end" });
      const sub = svg("text", { class: "sub", x: 16, y: h - 13 });
      const node = svg("g", { class: `node ${name}`, transform: `translate(${x} ${y})` },
        svg("rect", { class: "box", width: w, height: h, rx: 12 }),
        svg("rect", { class: "bar", x: 0, y: 14, width: 3.5, height: h - 28, rx: 1.7 }),
        svg("text", { class: "name", x: 16, y: 26 }, NAMES[name]), number, sub);
      this.nodes[name] = { node, number, sub };
      parts.push(node);
    }
    this.svg = svg("svg", { viewBox: layout.view, role: "img", "aria-label": "Requests in flight" }, ...parts);
    this.box.replaceChildren(this.svg);
    if (this.last) this.show(this.last);
  }

  show(snapshot) {
    this.last = snapshot;
    const { flow, point } = snapshot;
    const sum = (role, field) => snapshot.pools.filter((pool) => pool.role === role).reduce((total, pool) => total + pool[field], 0);
    const atPrefill = Math.max(0, sum("prefill", "ours") - flow.handing_off);
    const direct = Math.max(0, flow.placing + flow.prefilling - atPrefill);
    const perSecond = point[1];
    const drafting = sum("draft", "running");
    this.node("gateway", flow.queued, flow.queued ? "waiting for a worker" : "none waiting", 1, 0);
    this.node("prefill", atPrefill, null, sum("prefill", "workers"), sum("prefill", "troubled"));
    this.node("decode", flow.decoding + direct, null, sum("decode", "workers"), sum("decode", "troubled"));
    this.node("draft", drafting, null, sum("draft", "workers"), sum("draft", "troubled"));
    this.node("kvstore", sum("kvstore", "running"), null, sum("kvstore", "workers"), sum("kvstore", "troubled"));
    this.pipe("ask", atPrefill, atPrefill && plural(atPrefill, "prompt"));
    this.pipe("handoff", flow.handing_off || atPrefill, flow.handing_off && `${count(flow.handing_off)} handing off`);
    this.pipe("direct", direct, direct && `${count(direct)} direct`);
    this.pipe("tokens", perSecond / 20, perSecond && `${count(perSecond)} tokens/s`);
    this.pipe("draft", flow.decoding && drafting);
    const storing = sum("kvstore", "running");
    this.pipe("prefillKv", storing && sum("prefill", "workers"));
    this.pipe("decodeKv", storing);
    this.svg.setAttribute("aria-label", `Requests in flight: ${flow.queued} waiting, ${atPrefill} at prefill, ${flow.handing_off} handing off, ` +
      `${flow.decoding + direct} at decode; ${count(perSecond)} tokens per second`);
  }

  node(name, number, note, workers, troubled) {
    const { node, number: figure, sub } = this.nodes[name];
    text(figure, workers ? count(number) : "–");
    text(sub, note ?? (workers ? `${plural(workers, "worker")}${troubled ? ` · ${count(troubled)} unwell` : ""}` : "no workers"));
    node.classList.toggle("away", !workers);
    node.classList.toggle("trouble", troubled > 0);
  }

  pipe(name, amount, label) {
    const pipe = this.pipes[name];
    pipe.classList.toggle("on", amount > 0);
    pipe.style.animationDuration = `${(1.4 / (1 + Math.log2(1 + amount) / 2)).toFixed(2)}s`;
    if (this.labels[name]) text(this.labels[name], label || "");
  }
}
