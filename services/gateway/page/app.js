// The page: what arrives over dashboard/events, and who shows it.

import { Chart } from "./charts.js";
import { Chat } from "./chat.js";
import { Live, request, setKey } from "./connection.js";
import { Flow } from "./flow.js";
import { byId, count, duration, el, percent, text } from "./format.js";
import { Requests } from "./requests.js";
import { Pools, Workers } from "./workers.js";

const POINT = { at: 0, tokens: 1, requests: 2, running: 3, waiting: 4, ttft50: 5, ttft95: 6, itl50: 7, itl95: 8, acceptance: 9 };
const MAX_POINTS = 600;
const at = (name) => (point) => point[POINT[name]];

const milliseconds = (value, short) => (short ? (value >= 1000 ? `${value / 1000} s` : `${+value.toFixed(1)}`) : duration(value));
const charts = [
  new Chart(byId("c-tokens"), { label: "Tokens per second", lines: [at("tokens")], names: [""], format: (value, short) => count(value) + (short ? "" : " tokens/s"), least: 10 }),
  new Chart(byId("c-ttft"), { label: "Time to first token in milliseconds", lines: [at("ttft50"), at("ttft95")], names: ["p50", "p95"], format: milliseconds, least: 10 }),
  new Chart(byId("c-itl"), { label: "Time between tokens in milliseconds", lines: [at("itl50"), at("itl95")], names: ["p50", "p95"], format: milliseconds, least: 5 }),
  new Chart(byId("c-acceptance"), { label: "Share of draft tokens accepted", lines: [at("acceptance")], names: [""], format: (value) => percent(value).replace(" ", ""), least: 1, most: 1 }),
];
const flow = new Flow(byId("flow"));
const pools = new Pools();
const requests = new Requests();
const chat = new Chat({ onRequest: (name) => requests.choose(name), onKey: askForKey });
const workers = new Workers((search) => {
  live.query = search ? `?search=${encodeURIComponent(search)}` : "";
  live.open();
});
let points = [];

function figure(id, value) {
  const node = byId(id);
  const [number, unit] = String(value).split(" ");
  if (node.dataset.shown === value) return;
  node.dataset.shown = value;
  node.replaceChildren(number, ...(unit ? [el("span", {}, unit)] : []));
}

function showSnapshot(snapshot) {
  const { point } = snapshot;
  points = [...points.filter((one) => one[0] < point[0]), point].slice(-MAX_POINTS);
  text(byId("models"), snapshot.models.join(", "));
  text(byId("gateway"), `${snapshot.gateway} · up ${duration(snapshot.uptime_s * 1000)}`);
  text(byId("scope"), `This page shows what the gateway ${snapshot.gateway} knows: its own requests, and all workers that it hears. ` +
    "Other gateways, also those that share its port, have their own. Curves begin when the gateway started.");
  figure("f-tokens", count(point[POINT.tokens]));
  figure("f-running", count(point[POINT.running]));
  text(byId("f-waiting"), point[POINT.waiting] ? `${count(point[POINT.waiting])} waiting` : "none waiting");
  figure("f-ttft", duration(point[POINT.ttft50]));
  figure("f-itl", duration(point[POINT.itl50]));
  figure("f-acceptance", percent(point[POINT.acceptance]));
  figure("f-ended", count(snapshot.num_ended));
  text(byId("f-resumes"), snapshot.resumes ? `${count(snapshot.resumes)} went on elsewhere` : "requests");
  if (!snapshot.ready) setStatus(snapshot.state === "draining" ? "draining" : "not ready", "warn");
  charts.forEach((chart) => chart.show(points));
  flow.show(snapshot);
  pools.show(snapshot.pools);
  requests.showRunning(snapshot);
  chat.models(snapshot.models);
}

function setStatus(words, kind) {
  const pill = byId("live");
  text(pill, words);
  pill.className = `pill ${kind}`;
}

const live = new Live("dashboard/events", {
  status: setStatus,
  onKey: askForKey,
  onForbidden: showPlaygroundAlone,
  onEvent(event, data) {
    if (event === "history") { points = data; requests.reset(); }
    else if (event === "snapshot") showSnapshot(data);
    else if (event === "workers") workers.show(data);
    else if (event === "ended") requests.addEnded(data);
  },
});

// A tenant's key may ask models, but not see everyone's requests.
async function showPlaygroundAlone(why) {
  text(byId("forbidden-why"), `${why}. The playground works with this key.`);
  playgroundAlone(true);
  try {
    const { data } = await (await request("v1/models")).json();
    const names = data.map((model) => model.id);
    text(byId("models"), names.join(", "));
    chat.models(names);
  } catch (error) { setStatus(error.message, "bad"); }
}

function playgroundAlone(alone) {
  byId("forbidden").hidden = !alone;
  document.body.classList.toggle("playground-alone", alone);
}
byId("other-key").addEventListener("click", () => askForKey(false));

function askForKey(wrong) {
  const dialog = byId("key");
  text(byId("key-why"), wrong ? "That is not the key of this gateway. Try again."
    : "This gateway asks for its API key. It is kept in this tab until you close it, and sent to this server alone.");
  if (!dialog.open) dialog.showModal();
  byId("key-input").select();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key-input").value);
  byId("key").close();
  playgroundAlone(false);
  live.open();
});

const prefersLight = matchMedia("(prefers-color-scheme: light)");
function setTheme(light) {
  document.documentElement.classList.toggle("light", light);
  pools.redraw();
}
byId("theme").addEventListener("click", () => {
  const light = !document.documentElement.classList.contains("light");
  try { localStorage.setItem("penstock-theme", light ? "light" : "dark"); } catch { /* for this visit, then */ }
  setTheme(light);
});
let chosen = null;
try { chosen = localStorage.getItem("penstock-theme"); } catch { /* follow the system */ }
setTheme(chosen ? chosen === "light" : prefersLight.matches);
prefersLight.addEventListener("change", (event) => { if (!chosen) setTheme(event.matches); });

live.open();
