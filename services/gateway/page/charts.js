// Curves of the last minutes, drawn as SVG so that the style sheet colours them.

import { el, svg } from "./format.js";

const SPAN_S = 300;
const LEFT = 34, RIGHT = 4, TOP = 6, BOTTOM = 16;

function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

export class Chart {
  // `lines`: functions from a point to a value or null. `format(value)`; `least`: what the axis shows at the least.
  constructor(box, { label, lines, names, format, least, most = Infinity }) {
    Object.assign(this, { box, label, lines, names, format, least, most, points: [] });
    this.svg = svg("svg", { role: "img", "aria-label": label });
    this.tip = el("div", { class: "tip", hidden: true });
    box.append(this.svg, this.tip);
    box.addEventListener("pointermove", (event) => this.hover(event));
    box.addEventListener("pointerleave", () => this.hover(null));
    new ResizeObserver(() => this.draw()).observe(box);
  }

  show(points) {
    this.points = points;
    this.draw();
  }

  draw() {
    const { clientWidth: w, clientHeight: h } = this.box;
    if (!w || !h) return;
    const end = this.points.at(-1)?.[0] ?? 0;
    const visible = this.points.filter((point) => point[0] > end - SPAN_S);
    const values = visible.flatMap((point) => this.lines.map((line) => line(point))).filter((value) => value !== null);
    const top = Math.min(ceiling(Math.max(this.least, ...values)), this.most);
    const x = (this.x = (point) => LEFT + (1 - (end - point[0]) / SPAN_S) * (w - LEFT - RIGHT));
    const y = (value) => TOP + (1 - value / top) * (h - TOP - BOTTOM);
    this.visible = visible;
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      const at = Math.round(y(share * top)) + 0.5;
      parts.push(svg("line", { class: "grid", x1: LEFT, x2: w - RIGHT, y1: at, y2: at }));
      parts.push(svg("text", { x: LEFT - 6, y: at + 3.5, "text-anchor": "end" }, this.format(share * top, true)));
    }
    for (const minutes of [4, 2]) {
      parts.push(svg("text", { x: LEFT + (1 - (minutes * 60) / SPAN_S) * (w - LEFT - RIGHT), y: h - 2, "text-anchor": "middle" }, `−${minutes} min`));
    }
    parts.push(svg("text", { x: w - RIGHT, y: h - 2, "text-anchor": "end" }, "now"));
    this.lines.forEach((line, number) => {
      let path = "", first = null, last = null;
      for (const point of visible) {
        const value = line(point);
        if (value === null) { last = null; continue; }
        const at = `${x(point).toFixed(1)} ${y(Math.min(value, top)).toFixed(1)}`;
        path += last && point[0] - last < 8 ? `L${at}` : `M${at}`;
        first ??= x(point);
        last = point[0];
      }
      if (number === 0 && path && this.lines.length === 1 && path.indexOf("M", 1) < 0) {
        parts.push(svg("path", { class: "area", d: `${path}L${x(visible.at(-1)).toFixed(1)} ${y(0)}L${first.toFixed(1)} ${y(0)}Z` }));
      }
      parts.push(svg("path", { class: `l${number}`, d: path }));
    });
    this.cross = svg("line", { class: "cross", y1: TOP, y2: h - BOTTOM, visibility: "hidden" });
    parts.push(this.cross);
    this.svg.setAttribute("viewBox", `0 0 ${w} ${h}`);
    const latest = visible.at(-1);
    this.svg.setAttribute("aria-label", `${this.label}: ${latest ? this.describe(latest) : "nothing yet"}`);
    this.svg.replaceChildren(...parts);
  }

  describe(point) {
    return this.lines.map((line, number) => {
      const value = line(point);
      return `${this.names[number] ? `${this.names[number]} ` : ""}${value === null ? "–" : this.format(value)}`;
    }).join(" · ");
  }

  hover(event) {
    const near = event && this.visible?.length
      ? this.visible.reduce((best, point) => (Math.abs(this.x(point) - event.offsetX) < Math.abs(this.x(best) - event.offsetX) ? point : best))
      : null;
    this.tip.hidden = !near;
    this.cross?.setAttribute("visibility", near ? "visible" : "hidden");
    if (!near) return;
    this.cross.setAttribute("x1", this.x(near));
    this.cross.setAttribute("x2", this.x(near));
    this.tip.textContent = `${new Date(near[0] * 1000).toLocaleTimeString()}  ${this.describe(near)}`;
    this.tip.style.left = `${Math.max(0, Math.min(this.x(near) - this.tip.offsetWidth / 2, this.box.clientWidth - this.tip.offsetWidth))}px`;
  }
}
