// The playground: a conversation over /v1/chat/completions, streamed.

import { byId, count, duration, el, shownName } from "./format.js";
import { HttpError, events, request } from "./connection.js";

export class Chat {
  // `onRequest(name)` is called when an answer begins, `onKey()` when the gateway asks for its key.
  constructor({ onRequest, onKey }) {
    this.onRequest = onRequest;
    this.onKey = onKey;
    this.messages = [];
    this.results = null; // the form for results of the last answer's calls
    this.abort = null;
    this.log = byId("chat-log");
    this.input = byId("chat-input");
    this.welcome = this.log.firstElementChild;
    byId("chat-form").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    byId("chat-stop").addEventListener("click", () => this.abort?.abort());
    byId("chat-clear").addEventListener("click", () => this.clear());
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.send(); }
    });
    byId("chat-tools").addEventListener("input", () => this.choices());
  }

  // What `tool_choice` may be: the words, and each function of the tools that were typed.
  choices() {
    let names = [];
    try { names = JSON.parse(byId("chat-tools").value).map((tool) => tool.function?.name ?? tool.name).filter(Boolean); } catch { /* not yet JSON */ }
    const select = byId("chat-tool-choice");
    const chosen = select.value;
    select.replaceChildren(...["", "auto", "none", "required", ...names].map((name) => el("option", { value: name }, name || "as the API has it")));
    if (names.includes(chosen) || ["auto", "none", "required"].includes(chosen)) select.value = chosen;
  }

  models(names) {
    const select = byId("chat-model");
    if ([...select.options].map((option) => option.value).join("\n") === names.join("\n")) return;
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
    if (names.includes(chosen)) select.value = chosen;
  }

  clear() {
    this.abort?.abort();
    this.messages = [];
    this.results = null;
    this.log.replaceChildren(this.welcome);
    this.input.focus();
  }

  // :raises SyntaxError: what was typed as JSON is none
  body(turn) {
    const system = byId("chat-system").value.trim();
    const body = { messages: [...(system ? [{ role: "system", content: system }] : []), ...this.messages, ...turn], stream: true, stream_options: { include_usage: true } };
    const model = byId("chat-model").value;
    if (model) body.model = model;
    for (const [id, name] of [["chat-temperature", "temperature"], ["chat-max-tokens", "max_tokens"]]) {
      const value = byId(id).value;
      if (value !== "") body[name] = Number(value);
    }
    for (const [id, name] of [["chat-tools", "tools"], ["chat-format", "response_format"]]) {
      const typed = byId(id).value.trim();
      if (!typed) continue;
      try { body[name] = JSON.parse(typed); } catch (error) { throw new SyntaxError(`${name} is not JSON: ${error.message}`); }
    }
    const choice = byId("chat-tool-choice").value;
    if (choice) body.tool_choice = ["auto", "none", "required"].includes(choice) ? choice : { type: "function", function: { name: choice } };
    return body;
  }

  send() {
    const content = this.input.value.trim();
    if (content && !this.abort) this.ask([...this.told(), { role: "user", content }]);
  }

  // Results of calls as messages, as far as they were typed; every call must have one before the conversation goes on.
  told() {
    return [...(this.results?.elements ?? [])].filter((field) => field.name).map((field) => ({ role: "tool", tool_call_id: field.name, content: field.value }));
  }

  // One request: the conversation and `turn`, which becomes a part of it with the answer.
  async ask(turn) {
    let body;
    try { body = this.body(turn); } catch (error) { this.fail(error.message); return; }
    const content = turn.at(-1).role === "user" ? turn.at(-1).content : "";
    const results = this.results;
    this.results = null;
    if (results) results.disabled = true;
    this.welcome.remove();
    if (content) {
      this.log.append(el("div", { class: "message user" }, content));
      this.input.value = "";
    }
    const abort = (this.abort = new AbortController());
    this.busy(true);
    const thought = el("span", { class: "thought", hidden: true }), said = el("span", { class: "text" });
    const bubble = el("div", { class: "message assistant writing", "aria-busy": "true" }, thought, said);
    this.log.append(bubble);
    this.scroll(true);
    const began = performance.now();
    const answer = { text: "", calls: [], finish: "", usage: null, first: null, last: began, name: "" };
    try {
      const response = await request("v1/chat/completions", { body, signal: abort.signal });
      this.warn(response.headers.get("warning"));
      for await (const { data } of events(response)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new HttpError(response.status, chunk);
        this.take(chunk, answer, thought, said);
        this.scroll();
      }
      this.messages.push(...turn, this.said(answer));
      if (answer.calls.length) this.offer(answer.calls);
    } catch (error) {
      if (abort.signal.aborted) {
        answer.finish = "stopped";
        if (answer.text) this.messages.push(...turn, { role: "assistant", content: answer.text });
        else this.again(results);
      } else {
        if (!answer.text) bubble.remove();
        if (!answer.text && !this.input.value) this.input.value = content;
        this.again(results);
        this.fail(error.message, error.code, error.param);
        if (error instanceof HttpError && error.status === 401) this.onKey(true);
      }
    } finally {
      this.abort = null;
      this.busy(false);
      bubble.classList.remove("writing");
      bubble.removeAttribute("aria-busy");
      if (bubble.isConnected) this.facts(answer, began);
      this.scroll();
    }
  }

  take(chunk, answer, thought, said) {
    if (!answer.name && chunk.id) {
      answer.name = shownName(chunk.id);
      this.onRequest(answer.name);
    }
    answer.usage = chunk.usage ?? answer.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? {};
    if (content || reasoning || calls) {
      answer.last = performance.now();
      answer.first ??= answer.last;
    }
    if (reasoning) { thought.hidden = false; thought.append(reasoning); }
    if (content) { answer.text += content; said.append(content); }
    for (const call of calls ?? []) {
      const known = (answer.calls[call.index ?? 0] ??= { id: call.id ?? "", name: "", arguments: "", node: null });
      known.name += call.function?.name ?? "";
      known.arguments += call.function?.arguments ?? "";
      if (!known.node) said.after((known.node = el("span", { class: "call code" })));
      known.node.textContent = `${known.name}(${known.arguments})`;
    }
    answer.finish = choice.finish_reason ?? answer.finish;
  }

  // A field for the result of each call.
  offer(calls) {
    const fields = el("fieldset", { class: "results" }, ...calls.map((call) => el("label", {}, `Result of ${call.name}`, el("textarea", { name: call.id, rows: "2", spellcheck: "false", class: "code" }))));
    const form = el("form", {}, fields);
    fields.append(el("button", { type: "submit" }, calls.length > 1 ? "Send results" : "Send result"));
    form.addEventListener("submit", (event) => { event.preventDefault(); if (!this.abort) this.ask(this.told()); });
    this.results = fields;
    this.log.append(form);
  }

  // Results that were not taken can be sent again.
  again(results) {
    if (!results) return;
    results.disabled = false;
    this.results = results;
  }

  said(answer) {
    const message = { role: "assistant", content: answer.text };
    if (answer.calls.length) message.tool_calls = answer.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
    return message;
  }

  facts(answer, began) {
    const facts = [];
    const tokens = answer.usage?.completion_tokens;
    if (answer.first) facts.push(`first token ${duration(answer.first - began)}`);
    if (tokens) facts.push(`${count(tokens)} tokens`);
    if (tokens > 1 && answer.last > answer.first) facts.push(`${count((tokens - 1) / ((answer.last - answer.first) / 1000))} tokens/s`);
    if (answer.finish && answer.finish !== "stop") facts.push(answer.finish);
    const line = el("p", { class: "facts" }, facts.join(" · "));
    if (answer.name) line.append(" ", el("button", { type: "button", class: "quiet", onclick: () => { this.onRequest(answer.name); byId("timeline-title").scrollIntoView({ block: "center" }); } }, "timeline"));
    this.log.append(line);
  }

  warn(header) {
    const told = /"(.*)"/.exec(header ?? "");
    if (told) this.log.append(el("p", { class: "facts" }, told[1]));
  }

  fail(message, code = "", param = "") {
    this.welcome.remove();
    this.log.append(el("p", { class: "failure", role: "alert" }, [code, param, message].filter(Boolean).join(" · ")));
    this.scroll(true);
  }

  busy(busy) {
    byId("chat-stop").hidden = !busy;
    byId("chat-send").hidden = busy;
  }

  // Follow the answer, unless the reader has scrolled up.
  scroll(always = false) {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    if (always || scrollHeight - scrollTop - clientHeight < 120) this.log.scrollTop = scrollHeight;
  }
}
