// Shows openapi.json: routes by tag, and for each its parameters, its body's arguments, and its answers.

const $ = (id) => document.getElementById(id);

function element(name, className = "", ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

const resolve = (api, schema) => (schema && schema.$ref ? api.components.schemas[schema.$ref.split("/").pop()] : schema);
const nameOf = (schema) => schema.$ref.split("/").pop();
const show = (value) => JSON.stringify(value);

/** One line that says what values a schema takes. */
function typeOf(schema) {
  if (!schema) return "";
  if (schema.$ref) return nameOf(schema);
  if (schema.anyOf) return [...new Set(schema.anyOf.map(typeOf))].filter((text) => text !== "null").join(" or ");
  if (schema.const !== undefined) return show(schema.const);
  if (schema.enum) return schema.enum.filter((value) => value !== null).map(show).join(", ") || "null";
  const bounds = [];
  const between = (low, high, unit) => {
    if (low !== undefined && high !== undefined) bounds.push(`${low} to ${high}${unit}`);
    else if (low !== undefined) bounds.push(`${low}${unit} at least`);
    else if (high !== undefined) bounds.push(`${high}${unit} at most`);
  };
  if (schema.exclusiveMinimum !== undefined) bounds.push(`above ${schema.exclusiveMinimum}`);
  between(schema.minimum, schema.maximum, "");
  between(schema.minLength, schema.maxLength, " characters");
  between(schema.minItems, schema.maxItems, " entries");
  between(schema.minProperties, schema.maxProperties, " entries");
  if (schema.pattern) bounds.push(schema.pattern);
  if (schema.not && schema.not.const !== undefined) bounds.push(`not ${show(schema.not.const)}`);
  const kind = Array.isArray(schema.type) ? schema.type.filter((type) => type !== "null").join(" or ") : schema.type || "";
  const inner = kind === "array" && schema.items ? `array of ${typeOf(schema.items)}` : kind;
  return inner + (bounds.length ? ` (${bounds.join(", ")})` : "");
}

function table(rows) {
  const body = element("tbody");
  for (const cells of rows) body.append(element("tr", "", ...cells.map((cell) => element("td", "", cell))));
  return element("div", "scroll", element("table", "", body));
}

const code = (text) => element("code", "", text);

/** The arguments of a body, and those of the objects in it, each type once. */
function* argumentsOf(api, schema, seen = new Set()) {
  const name = schema.$ref ? nameOf(schema) : "Form";
  if (seen.has(name)) return;
  seen.add(name);
  const object = resolve(api, schema);
  if (!object.properties) return;
  yield [name, object];
  for (const match of show(object.properties).matchAll(/"#\/components\/schemas\/(\w+)"/g)) {
    yield* argumentsOf(api, { $ref: `#/components/schemas/${match[1]}` }, seen);
  }
}

const isRefused = (schema) => (schema.description || "").startsWith("Refused");
const isIgnored = (schema) => (schema.description || "").startsWith("Has no effect");
const isWithout = (schema) => isRefused(schema) || isIgnored(schema);

function rowsOf(object) {
  const obeyed = [], refused = [], ignored = [];
  for (const [name, schema] of Object.entries(object.properties)) {
    if (isRefused(schema)) refused.push(name);
    else if (isIgnored(schema)) ignored.push(name);
    else obeyed.push([code(name), typeOf(schema) + ((object.required || []).includes(name) ? " – required" : "")]);
  }
  if (refused.length) obeyed.push(["refused", refused.join(", ")]);
  if (ignored.length) obeyed.push(["no effect", ignored.join(", ")]);
  return obeyed;
}

// A body is JSON, or a form.
function schemaOf(body) {
  return Object.values(body.content)[0].schema;
}

function operation(api, path, method, described) {
  const keyed = described.security.length > 0;
  const summary = element(
    "summary", "",
    element("span", "method", method.toUpperCase()), code(path), element("span", "muted", described.summary),
    element("span", "key", keyed ? "API key" : ""),
  );
  const details = element("details", "card", summary);
  details.id = described.operationId;
  details.addEventListener("toggle", () => details.childElementCount > 1 || fill(), { once: true });
  function fill() {
    const parameters = described.parameters || [];
    if (parameters.length) {
      details.append(element("h3", "", "Parameters"));
      details.append(table(parameters.map((p) => [code(p.name), `${p.in} – ${p.description}`])));
    }
    const body = described.requestBody;
    if (body) {
      for (const [name, object] of argumentsOf(api, schemaOf(body))) {
        details.append(element("h3", "", name), element("p", "muted", object.description || ""), table(rowsOf(object)));
      }
    }
    details.append(element("h3", "", "Answers"));
    details.append(table(Object.entries(described.responses).map(([status, response]) => {
      const kinds = Object.entries(response.content || {}).map(([kind, media]) => `${kind} ${typeOf(media.schema) || ""}`);
      return [code(status), response.description, kinds.join(", ")];
    })));
  }
  return details;
}

function matches(words, path, described) {
  const text = `${path} ${described.summary} ${show(described.requestBody || {})}`.toLowerCase();
  return words.every((word) => text.includes(word));
}

function render(api) {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const groups = new Map();
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, described] of Object.entries(methods)) {
      if (!matches(words, path, described) && !argumentNamed(api, described, words)) continue;
      const group = groups.get(described.tags[0]) || element("section", "", element("h2", "", described.tags[0]));
      group.append(operation(api, path, method, described));
      groups.set(described.tags[0], group);
    }
  }
  $("operations").replaceChildren(...(groups.size ? groups.values() : [element("p", "empty", "Nothing by that name.")]));
}

function argumentNamed(api, described, words) {
  if (!described.requestBody || !words.length) return false;
  const names = [];
  for (const [, object] of argumentsOf(api, schemaOf(described.requestBody))) {
    const obeyed = Object.entries(object.properties).filter(([, schema]) => !isWithout(schema));
    names.push(...obeyed.map(([name]) => name));
  }
  return words.every((word) => names.some((name) => name.includes(word)));
}

try {
  const api = await (await fetch("openapi.json")).json();
  $("version").textContent = api.info.version;
  $("about").textContent = api.info.description;
  $("filter").addEventListener("input", () => render(api));
  render(api);
  document.getElementById(location.hash.slice(1))?.setAttribute("open", "");
} catch (error) {
  $("operations").replaceChildren(element("p", "empty", `openapi.json could not be read: ${error}`));
}
