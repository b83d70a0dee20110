// The gateway: server-sent events and JSON over fetch, which, unlike EventSource, can send the API key.

const KEY = "penstock-api-key";
let key = "";
try { key = sessionStorage.getItem(KEY) ?? ""; } catch { /* storage is off: the key lives in this page alone */ }

export function setKey(value) {
  key = value;
  try { sessionStorage.setItem(KEY, value); } catch { /* see above */ }
}

export class HttpError extends Error {
  constructor(status, body) {
    const error = body?.error ?? {};
    super(error.message ?? `the server answered ${status}`);
    this.status = status;
    this.code = error.code ?? String(status);
    this.param = error.param ?? "";
  }
}

// :raises HttpError: any status but 2xx
export async function request(path, { body, signal, headers = {} } = {}) {
  const options = { signal, cache: "no-store", headers: { ...headers } };
  if (key) options.headers.authorization = `Bearer ${key}`;
  if (body !== undefined) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    options.headers["content-type"] = "application/json";
  }
  const response = await fetch(path, options);
  if (!response.ok) throw new HttpError(response.status, await response.json().catch(() => null));
  return response;
}

// The events of a response, as {event, data}. Comments are left out.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    pending += value;
    let end;
    while ((end = pending.indexOf("\n\n")) >= 0) {
      const lines = pending.slice(0, end).split("\n");
      pending = pending.slice(end + 2);
      const field = (name) => lines.filter((line) => line.startsWith(name)).map((line) => line.slice(name.length).trimStart()).join("\n");
      const data = field("data:");
      if (data) yield { event: field("event:") || "message", data };
    }
  }
}

// A stream of events that comes back when it breaks. `status(text, kind)` says how it is; `onKey()` is called when a key is needed,
// and `open` again once there is one; `onForbidden(why)` when the key that was sent may not see this.
export class Live {
  constructor(path, { onEvent, status, onKey, onForbidden }) {
    this.path = path;
    this.onEvent = onEvent;
    this.status = status;
    this.onKey = onKey;
    this.onForbidden = onForbidden;
    this.query = "";
    this.abort = null;
    this.heardAt = 0;
    setInterval(() => this.check(), 1000);
  }

  async open() {
    this.abort?.abort();
    const abort = (this.abort = new AbortController());
    let delay = 500;
    while (!abort.signal.aborted) {
      try {
        const response = await request(this.path + this.query, { signal: abort.signal });
        for await (const { event, data } of events(response)) {
          if (abort.signal.aborted) return;
          delay = 500;
          this.heardAt = performance.now();
          this.status("live", "good");
          this.onEvent(event, JSON.parse(data));
        }
      } catch (error) {
        if (abort.signal.aborted) return;
        if (error instanceof HttpError && error.status === 401) {
          this.status("API key needed", "warn");
          this.onKey(Boolean(key));
          return;
        }
        if (error instanceof HttpError && error.status === 403) {
          this.status("playground only", "warn");
          this.onForbidden(error.message);
          return;
        }
        this.status(error instanceof HttpError ? error.message : "reconnecting", "bad");
      }
      this.heardAt = 0;
      if (abort.signal.aborted) return;
      await new Promise((resolve) => setTimeout(resolve, delay));
      delay = Math.min(delay * 2, 8000);
    }
  }

  check() {
    if (this.heardAt && performance.now() - this.heardAt > 5000) this.status("no news", "warn");
  }
}
