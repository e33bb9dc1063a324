"use strict";
// Text of the model and of the server reaches the page as text nodes only.
const schema = JSON.parse(document.getElementById("schema").textContent);
const modes = Object.fromEntries(schema.modes.map(mode => [mode.name, mode]));
const find = id => document.getElementById(id);
const listed = names => names.length < 2 ? names.join("") : names.slice(0, -1).join(", ") + " and " + names.at(-1);
const POLL_MS = 1000, MAX_NAMED = 6, MAX_BADGE = 40; // milliseconds between readings of /metrics; rows that are named; characters

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// Text of one row: paragraphs, which are its steps, with marks and tool calls.
class Card {
  constructor(name, hue) {
    this.name = name;
    this.hue = hue;
    this.state = make("span");
    this.paragraph = make("p");
    this.body = make("div", {className: "body", tabIndex: 0, ariaLabel: `Text of ${name}`, role: "group"}, this.paragraph);
    this.head = make("h3", {}, name, this.state);
    this.element = make("article", {className: "card"}, this.head, this.body);
    this.element.style.setProperty("--h", hue);
    this.steps = 0;
    this.calls = [];
  }

  write(text, tag = "") {
    const follows = this.body.scrollHeight - this.body.scrollTop - this.body.clientHeight < 40;
    this.paragraph.append(tag ? make(tag === "thinking" ? "span" : tag, {className: tag}, text) : text);
    this.show("writing");
    if (follows) this.body.scrollTop = this.body.scrollHeight;
  }

  begin() {
    if (this.paragraph.childNodes.length) this.body.append(this.paragraph = make("p"));
  }

  show(state) {
    this.element.classList.toggle("writing", state === "writing");
    this.state.textContent = state + (this.steps && state === "writing" ? ` step ${this.steps + 1}` : "");
  }

  mark(text, hue = this.hue) {
    const mark = make("span", {className: "mark"}, text);
    mark.style.setProperty("--h", hue);
    this.paragraph.append(mark);
  }

  call({index = 0, function: {name = "", arguments: more = ""} = {}}) {
    if (!this.calls[index]) {
      this.calls[index] = {name: make("b"), code: make("code")};
      this.body.append(make("div", {className: "call"}, this.calls[index].name, " ", this.calls[index].code));
    }
    this.calls[index].name.append(name);
    this.calls[index].code.append(more);
  }
}

// Where a choice of a response can be forked: a button, and a line for a message that follows and for the number of forks.
class ForkPoint {
  constructor(answers, id, choice, name) {
    Object.assign(this, {answers, id, choice, name, children: 0});
    this.button = make("button", {type: "button", className: "fork", ariaLabel: `Fork ${name}`, ariaExpanded: "false"}, "Fork");
    this.words = make("input", {ariaLabel: `Message after ${name}`, autocomplete: "off", placeholder: "Message, or empty to continue"});
    this.number = make("input", {type: "number", min: 1, value: 1, required: true, ariaLabel: "Number of forks"});
    this.line = make("form", {className: "line", hidden: true, ariaLabel: `Forks of ${name}`}, this.words, this.number, make("button", {type: "submit"}, "Fork"));
    this.button.addEventListener("click", () => this.show(this.line.hidden));
    this.line.addEventListener("submit", event => { event.preventDefault(); fork(this); });
    this.line.addEventListener("keydown", event => {
      if (event.key !== "Escape") return;
      this.show(false);
      this.button.focus();
    });
  }

  show(isShown) {
    this.line.hidden = !isShown;
    this.button.ariaExpanded = String(isShown);
    if (isShown) this.words.focus();
  }

  // A response that was stopped, or failed, is not kept.
  close() {
    this.show(false);
    this.button.hidden = true;
  }

  place(head) {
    head.append(this.button);
    head.after(this.line);
  }
}

// The rows of one answer in bands from top to bottom: columns side by side, or a row that spans them.
class Rows {
  constructor(mode, title) {
    this.mode = mode;
    this.head = make("h2", {}, title);
    this.bands = make("div", {className: "bands"}, this.head);
    this.forks = make("div", {className: "forks"});
    this.element = make("section", {className: "answer"}, this.bands, this.forks);
    this.cards = new Map(); // the last card of each row
    this.band = null;
  }

  get columns() { return [...this.cards.values()].filter(card => !this.mode.across.includes(card.name)); }

  card(key, name) {
    const across = this.mode.across.includes(name), known = this.cards.get(key);
    if (known && (known.band === this.band || !across && !known.joined)) return known;
    if (!this.band || this.band.across !== across) {
      if (this.band?.across) for (const card of this.cards.values()) if (card.band === this.band) card.show("");
      this.band = {across, element: make("div", {className: across ? "band across" : "band"})};
      this.bands.append(this.band.element);
    }
    const card = new Card(name, schema.hues[this.columns.filter(other => other !== known).length % schema.hues.length]);
    card.band = this.band;
    this.cards.set(key, card);
    this.band.element.append(card.element);
    return card;
  }

  // Events as in docs/serve.md: begin, step, end, inject or join; none for generated text
  write(key, name, text, event) {
    if (event === "join") return this.join(key, name);
    if (event === "step" || event === "end") {
      const card = this.cards.get(key);
      if (card) event === "end" ? card.show("finished") : this.finish(card);
      return;
    }
    const card = this.card(key, name);
    if (event === "begin") card.begin();
    if (text) card.write(text, event ? "i" : "");
  }

  finish(card) {
    card.steps++;
    card.show(this.mode.across.includes(card.name) ? "" : "writing");
    if (!this.mode.reads) return;
    for (let last; (last = card.paragraph.lastChild) && !last.textContent.trim();) last.remove();
    card.mark(`step ${card.steps} shared`);
    for (const other of this.columns) if (other !== card) other.mark(`reads ${card.name} ${card.steps}`, card.hue);
  }

  join(key, name) {
    const own = this.cards.get(key);
    const joined = this.columns.filter(card => card !== own && !card.joined);
    for (const card of joined) { card.joined = true; card.show("joined"); }
    this.card(key, name).mark(`joins ${joined.length > MAX_NAMED ? `${joined.length} rows` : listed(joined.map(card => card.name))}`);
  }

  // The answer of a mode that combines rows, and the fields of its output.
  end(text, output) {
    const columns = this.columns, facts = make("dl");
    const isShort = value => ["string", "number"].includes(typeof value) && value !== "" && String(value).length <= MAX_BADGE;
    for (const [name, value] of Object.entries(output)) {
      const words = name.replaceAll("_", " ");
      if (name === "chosen" && columns[value]) columns[value].element.classList.add("chosen");
      if (Array.isArray(value) && value.length === columns.length && value.every(item => item === null || isShort(item)))
        value.forEach((item, index) => item !== null && item !== columns[index].name && columns[index].element.append(make("p", {className: "about"}, `${words}: ${item}`)));
      else if (name === "chosen" && columns[value]) facts.append(make("dt", {}, words), make("dd", {}, columns[value].name));
      else if (isShort(value)) facts.append(make("dt", {}, words), make("dd", {}, String(value)));
      else if (name === "votes") facts.append(make("dt", {}, words), make("dd", {}, Object.entries(value).map(pair => pair.join(": ")).join(", ") || "none"));
    }
    const short = (name, value) => Array.isArray(value) && value.length > 8 && value.every(Number.isInteger) ? `${value.length} numbers` : value;
    const whole = make("details", {}, make("summary", {}, "Output of the mode"), make("pre", {tabIndex: 0}, JSON.stringify(output, short, 1)));
    const body = make("div", {className: "body", tabIndex: 0, role: "group", ariaLabel: "Result"}, make("p", {}, text));
    this.head = make("h3", {}, "Result");
    this.bands.append(make("article", {className: "card result"}, this.head, ...(text ? [body] : []), facts, whole));
  }
}

// Answers that arrive in one stream: those of a request, or forks of an answer.
class Answers {
  constructor(mode, place, parent = null, words = "") {
    Object.assign(this, {mode, place, parent, words});
    this.controller = new AbortController();
    this.rows = new Map(); // by number; if each row is an answer, all are in one
    this.points = new Map(); // by number
    this.usages = new Map(); // of a request: one, of number 0
    this.transcript = "";
  }

  // A response reports its usage last.
  isComplete(number) { return this.usages.has(this.parent ? number : 0); }

  get writing() { return new Set([...this.points].filter(([number]) => !this.isComplete(number)).map(([, point]) => point.id)); }

  receive({id, child, choices, usage}) {
    for (const choice of choices) {
      this.write(child ?? choice.index, id, choice);
      this.transcript = choice.transcript ?? this.transcript;
    }
    if (usage) this.finish(child ?? 0, usage);
  }

  rowsOf(number) { return this.rows.get(this.mode.answers ? 0 : number); }

  begin(number, id, choice, row) {
    const {mode, parent} = this, given = mode.answers && row || `Answer ${number + 1}`;
    const point = new ForkPoint(this, id, choice, parent ? `${parent.name}.${++parent.children}` : given);
    this.points.set(number, point);
    if (!this.rowsOf(number)) {
      const label = parent ? `${point.name} continues ${parent.name}` : point.name;
      const title = mode.answers ? parent ? `Forks of ${parent.name}` : "" : label;
      const rows = new Rows(mode, title);
      if (this.words) rows.head.after(make("p", {className: "about"}, `Message: ${this.words}`));
      this.rows.set(mode.answers ? 0 : number, rows);
      this.place.append(rows.element);
    }
    const rows = this.rowsOf(number), card = mode.answers ? rows.card(number, point.name) : null;
    if (card && parent) card.mark(`continues ${parent.name}`);
    point.below = rows.forks;
    point.place((card ?? rows).head);
    return point;
  }

  write(number, id, {index, row, delta, finish_reason: reason, mode_output: output}) {
    const {mode} = this, point = this.points.get(number) ?? this.begin(number, id, index, row), rows = this.rowsOf(number);
    const name = mode.answers ? point.name : row ?? point.name, key = mode.answers ? number : name;
    const thought = delta.reasoning_content ?? "", text = delta.row_content ?? (mode.answers ? delta.content : "") ?? "";
    if (thought) rows.card(key, name).write(thought, "thinking");
    if (text || delta.row_event) rows.write(key, name, text, delta.row_event);
    for (const call of delta.tool_calls ?? []) rows.card(key, name).call(call);
    if (!reason) return;
    if (mode.answers) return rows.card(key, name).show(reason === "length" ? "out of tokens" : "finished");
    for (const card of rows.cards.values()) if (!card.joined) card.show("finished");
    rows.end(delta.content ?? "", output ?? {});
    point.place(rows.head);
  }

  finish(number, usage) {
    this.usages.set(number, usage);
    if (!this.parent) return;
    const {prompt_tokens: tokens, completion_tokens: written, prompt_tokens_details: {cached_tokens: cached}} = usage;
    const place = this.mode.answers ? this.rowsOf(number).cards.get(number).element : this.rowsOf(number).bands;
    place.append(make("p", {className: "about"}, `${written} ${written === 1 ? "token" : "tokens"}; ${cached} of ${tokens} tokens of its prompt were cached`));
  }

  // The stream has ended.
  end() {
    for (const rows of this.rows.values()) for (const element of rows.bands.querySelectorAll(".writing")) element.classList.remove("writing");
    for (const [number, point] of this.points) this.isComplete(number) ? stored.add(point.id) : point.close();
  }

  total(count) { return [...this.usages.values()].map(count).reduce((sum, value) => sum + value, 0); }

  facts(seconds) {
    const tokens = this.total(usage => usage.completion_tokens), cached = this.total(usage => usage.prompt_tokens_details.cached_tokens);
    const prompts = this.total(usage => usage.prompt_tokens), speed = `${(tokens / seconds).toFixed(1)} tokens/s`;
    if (this.parent) return [speed, `${cached} of ${prompts} tokens of the prompts of these forks were cached`];
    const usage = this.usages.get(0), shared = `${prompts} tokens of the prompt stored once, ${cached} of them before this run`;
    return [speed, `${usage.forward_passes} passes`, megabytes(usage.kv_bytes), shared];
  }
}

// The form

let model = "";
const bool = [["", "default"], ["true", "true"], ["false", "false"]];

function field({name, type, about, default: value}) {
  const placeholder = typeof value === "string" ? value : JSON.stringify(value);
  const isLong = typeof value === "string" && (value.length > MAX_BADGE || value.includes("\n"));
  const input = type.startsWith("bool") ? make("select", {}, ...bool.map(([value, text]) => make("option", {value}, value ? text : `default (${placeholder})`)))
    : make(isLong ? "textarea" : "input", {placeholder, autocomplete: "off"});
  input.name = name;
  const words = make("small", {id: `about-${name}`}, about.replaceAll("`", ""));
  input.setAttribute("aria-describedby", words.id);
  input.setAttribute("aria-label", name);
  return make("label", {}, make("b", {}, name), input, words);
}

function read({name, default: value}) {
  const text = find("settings").querySelector(`[name="${CSS.escape(name)}"]`).value;
  if (text === "") return [];
  if (typeof value === "string") return [[name, text]];
  try { return [[name, JSON.parse(text)]]; } catch { return [[name, text]]; }
}

function chooseMode() {
  const mode = modes[find("mode").value];
  find("about").textContent = mode ? mode.about.replaceAll(/\s+/g, " ").replaceAll("`", "") : "Answers of the model, which share the prompt.";
  find("settings").replaceChildren(...(mode ? mode.settings.map(field) : []));
  find("more").hidden = !mode;
}

function body() {
  const mode = find("mode").value, given = mode ? modes[mode].settings.flatMap(read) : [];
  const numbers = ["n", "max_tokens", "temperature", "seed"].filter(name => find(name).value !== "").map(name => [name, find(name).valueAsNumber]);
  const found = {...Object.fromEntries([...given, ...numbers]), ...(mode ? {generation_mode: mode} : {})};
  const messages = [{role: "user", content: find("prompt").value}];
  return {model, messages, transcript: true, ...STREAMED, ...found};
}

// The server

const STREAMED = {store: true, stream: true, stream_options: {include_usage: true}}; // stored: it can be forked after its end
const streams = new Set(), stored = new Set(); // answers that arrive; ids of complete ones
let polling = null;

async function ask(path, options = {}) {
  const key = find("key").value, headers = {"Content-Type": "application/json", ...(key ? {Authorization: `Bearer ${key}`} : {})};
  const response = await fetch(path, {...options, headers});
  if (response.status === 401) {
    find("keyline").hidden = false;
    find("key").focus();
  }
  if (!response.ok) throw new Error((await response.json().catch(() => null))?.error?.message ?? `status ${response.status}`);
  return response;
}

async function connect() {
  try {
    model = (await (await ask("v1/models")).json()).data[0].id;
    find("model").textContent = model;
    find("error").textContent = "";
  } catch (error) {
    find("model").textContent = "not connected";
    const asksForKey = !find("keyline").hidden && !find("key").value; // nothing was typed yet: no error
    find("error").textContent = asksForKey ? "" : error.message;
  }
}

const stop = () => streams.forEach(answers => answers.controller.abort());

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const {done, value} = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      const event = JSON.parse(part.replace("data: ", ""));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

async function metrics() {
  const lines = (await (await ask("metrics")).text()).matchAll(/^hf_parallel_(\w+) (\S+)$/gm);
  return Object.fromEntries([...lines].map(([, name, value]) => [name, +value]));
}

const showNumbers = facts => find("numbers").replaceChildren(...facts.map(text => make("span", {}, text)));
const megabytes = bytes => `${(bytes / 1e6).toFixed(1)} MB of keys and values`;

async function watch(signal) {
  for (let before = await metrics(), begun = performance.now(); !signal.aborted;) {
    await new Promise(resolve => setTimeout(resolve, POLL_MS));
    const found = await metrics(), seconds = (performance.now() - begun) / 1000;
    if (signal.aborted) return;
    const [tokens, passes] = ["decoded_tokens_total", "steps_total"].map(name => found[name] - before[name]);
    showNumbers([`server: ${(tokens / seconds).toFixed(1)} tokens/s`, `${passes} passes`, megabytes(found.kv_bytes)]);
  }
}

// Show the answers to a request until they are complete, fail or are stopped.
async function stream(answers, path, content) {
  const {signal} = answers.controller, begun = performance.now();
  streams.add(answers);
  find("error").textContent = "";
  find("status").textContent = "Waiting for the first token";
  find("run").disabled = true;
  find("stop").disabled = false;
  try {
    const response = await ask(path, {method: "POST", body: JSON.stringify(content), signal});
    if (!polling) watch((polling = new AbortController()).signal).catch(() => null);
    for await (const event of events(response)) {
      answers.receive(event);
      if (answers.mode.listens) listen(answers);
      const writing = [...find("rows").querySelectorAll(".writing h3")].map(head => head.firstChild.data);
      const words = writing.length > MAX_NAMED ? `${writing.length} rows are writing` : `${listed(writing)} ${writing.length === 1 ? "is" : "are"} writing`;
      if (writing.length && find("status").textContent !== words) find("status").textContent = words;
    }
    const seconds = (performance.now() - begun) / 1000;
    find("status").textContent = `Finished: ${answers.total(usage => usage.completion_tokens)} tokens in ${seconds.toFixed(1)} s`;
    showNumbers(answers.facts(seconds));
  } catch (error) {
    find("status").textContent = signal.aborted ? "Stopped" : "";
    if (!signal.aborted) find("error").textContent = error.message;
  } finally {
    streams.delete(answers);
    answers.end();
    find("say").hidden = ![...streams].some(other => other.mode.listens && other.points.size);
    if (!streams.size) {
      polling?.abort();
      polling = null;
      find("run").disabled = false;
      find("stop").disabled = true;
    }
  }
}

async function run() {
  if (streams.size || !find("form").reportValidity()) return;
  // Answers that are not shown any more are not kept either.
  for (const id of stored) ask(`v1/chat/completions/${encodeURIComponent(id)}`, {method: "DELETE"}).catch(() => null);
  stored.clear();
  find("rows").replaceChildren();
  find("transcript").hidden = true;
  find("to").replaceChildren(make("option", {}, "all"));
  showNumbers([]);
  const answers = new Answers(modes[find("mode").value] ?? {answers: true, across: [], reads: false}, find("rows"));
  await stream(answers, "v1/chat/completions", body());
  // A file, as the policy of this page would forbid the scripts of another page that it opens.
  URL.revokeObjectURL(find("transcript").href);
  find("transcript").href = URL.createObjectURL(new Blob([answers.transcript], {type: "text/html"}));
  find("transcript").hidden = !answers.transcript;
}

async function fork(point) {
  const words = point.words.value.trim(), messages = words ? [{role: "user", content: words}] : undefined;
  const answers = new Answers(point.answers.mode, point.below, point, words);
  point.words.value = "";
  point.show(false);
  const content = {...STREAMED, n: point.number.valueAsNumber, choice: point.choice, messages, transcript: false};
  await stream(answers, `v1/chat/completions/${encodeURIComponent(point.id)}/fork`, content);
  if (!answers.points.size && !point.button.hidden) {
    point.words.value ||= words;
    point.show(true);
  }
}

// A line for the rows that are writing, under the names that have been seen
function listen(answers) {
  find("say").hidden = false;
  const known = new Set([...find("to").options].map(option => option.value));
  for (const rows of answers.rows.values()) for (const card of rows.columns) if (!known.has(card.name)) {
    known.add(card.name);
    find("to").append(make("option", {}, card.name));
  }
}

async function say() {
  const text = find("words").value, ids = [...streams].filter(answers => answers.mode.listens).flatMap(answers => [...answers.writing]);
  if (!text || !ids.length) return;
  find("words").value = "";
  find("error").textContent = "";
  const said = {method: "POST", body: JSON.stringify({text, to: find("to").value})};
  try { await Promise.all(ids.map(id => ask(`v1/chat/completions/${encodeURIComponent(id)}/inject`, said))); }
  catch (error) {
    find("words").value ||= text;
    find("error").textContent = error.message;
  }
}

find("mode").append(...Object.keys(modes).map(value => make("option", {value}, value)));
find("mode").value = Object.keys(modes).find(name => modes[name].reads) ?? "";
find("mode").addEventListener("change", chooseMode);
find("key").addEventListener("change", connect);
find("form").addEventListener("submit", event => { event.preventDefault(); run(); });
find("say").addEventListener("submit", event => { event.preventDefault(); say(); });
find("stop").addEventListener("click", stop);
addEventListener("keydown", event => {
  if (event.target.closest?.(".line")) return; // it has keys of its own
  if (event.key === "Escape") stop();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run();
});
chooseMode();
connect();
