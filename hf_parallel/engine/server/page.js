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
    this.element = make("article", {className: "card"}, make("h3", {}, name, this.state), this.body);
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

// The rows of one answer in bands from top to bottom: columns side by side, or a row that spans them.
class Rows {
  constructor(mode, title) {
    this.mode = mode;
    this.element = make("section", {className: "answer"}, make("h2", {}, title));
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
      this.element.append(this.band.element);
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
    this.element.append(make("article", {className: "card result"}, make("h3", {}, "Result"), ...(text ? [body] : []), facts, whole));
  }
}

// The form

let model = "", running = null;
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
  return JSON.stringify({model, messages, transcript: true, stream: true, stream_options: {include_usage: true}, ...found});
}

// The server

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

async function run() {
  if (running || !find("form").reportValidity()) return;
  running = new AbortController();
  const {signal} = running, polling = new AbortController(), begun = performance.now();
  const mode = modes[find("mode").value] ?? {answers: true, across: [], reads: false};
  const answers = new Map(), several = +find("n").value > 1;
  find("rows").replaceChildren();
  find("error").textContent = "";
  find("status").textContent = "Waiting for the first token";
  find("transcript").hidden = true;
  find("to").replaceChildren(make("option", {}, "all"));
  find("run").disabled = true;
  find("stop").disabled = false;
  showNumbers([]);
  let usage = null, transcript = "";
  try {
    const response = await ask("v1/chat/completions", {method: "POST", body: body(), signal});
    watch(polling.signal).catch(() => null);
    for await (const event of events(response)) {
      usage = event.usage ?? usage;
      running.name = event.id;
      for (const choice of event.choices) {
        receive(mode, answers, several, choice);
        transcript = choice.transcript ?? transcript;
      }
      if (mode.listens) listen(answers);
      const writing = [...find("rows").querySelectorAll(".writing h3")].map(head => head.firstChild.data);
      const words = writing.length > MAX_NAMED ? `${writing.length} rows are writing` : `${listed(writing)} ${writing.length === 1 ? "is" : "are"} writing`;
      if (writing.length && find("status").textContent !== words) find("status").textContent = words;
    }
    const seconds = (performance.now() - begun) / 1000, tokens = usage.completion_tokens;
    find("status").textContent = `Finished: ${tokens} tokens in ${seconds.toFixed(1)} s`;
    const shared = `${usage.prompt_tokens} tokens of the prompt stored once, ${usage.prompt_tokens_details.cached_tokens} of them before this run`;
    showNumbers([`${(tokens / seconds).toFixed(1)} tokens/s`, `${usage.forward_passes} passes`, megabytes(usage.kv_bytes), shared]);
    // A file, as the policy of this page would forbid the scripts of another page that it opens.
    URL.revokeObjectURL(find("transcript").href);
    find("transcript").href = URL.createObjectURL(new Blob([transcript], {type: "text/html"}));
    find("transcript").hidden = !transcript;
  } catch (error) {
    find("status").textContent = signal.aborted ? "Stopped" : "";
    if (!signal.aborted) find("error").textContent = error.message;
  } finally {
    polling.abort();
    running = null;
    find("say").hidden = true;
    for (const card of document.querySelectorAll(".writing")) card.classList.remove("writing");
    find("run").disabled = false;
    find("stop").disabled = true;
  }
}

// A line for the rows that are writing, under the names that have been seen
function listen(answers) {
  find("say").hidden = false;
  const known = new Set([...find("to").options].map(option => option.value));
  for (const rows of answers.values()) for (const card of rows.columns) if (!known.has(card.name)) {
    known.add(card.name);
    find("to").append(make("option", {}, card.name));
  }
}

async function say() {
  const text = find("words").value;
  if (!text || !running) return;
  find("words").value = "";
  find("error").textContent = "";
  try { await ask(`v1/chat/completions/${encodeURIComponent(running.name)}/inject`, {method: "POST", body: JSON.stringify({text, to: find("to").value})}); }
  catch (error) {
    find("words").value ||= text;
    find("error").textContent = error.message;
  }
}

function receive(mode, answers, several, {index, row, delta, finish_reason: reason, mode_output: output}) {
  const group = mode.answers ? 0 : index, name = row ?? `Answer ${index + 1}`, key = mode.answers ? index : name;
  if (!answers.has(group)) {
    answers.set(group, new Rows(mode, several && !mode.answers ? `Answer ${index + 1}` : ""));
    find("rows").append(answers.get(group).element);
  }
  const rows = answers.get(group);
  const thought = delta.reasoning_content ?? "", text = delta.row_content ?? (mode.answers ? delta.content : "") ?? "";
  if (thought) rows.card(key, name).write(thought, "thinking");
  if (text || delta.row_event) rows.write(key, name, text, delta.row_event);
  for (const call of delta.tool_calls ?? []) rows.card(key, name).call(call);
  if (!reason) return;
  if (mode.answers) rows.card(key, name).show(reason === "length" ? "out of tokens" : "finished");
  else {
    for (const card of rows.cards.values()) if (!card.joined) card.show("finished");
    rows.end(delta.content ?? "", output ?? {});
  }
}

find("mode").append(...Object.keys(modes).map(value => make("option", {value}, value)));
find("mode").value = Object.keys(modes).find(name => modes[name].reads) ?? "";
find("mode").addEventListener("change", chooseMode);
find("key").addEventListener("change", connect);
find("form").addEventListener("submit", event => { event.preventDefault(); run(); });
find("say").addEventListener("submit", event => { event.preventDefault(); say(); });
find("stop").addEventListener("click", () => running?.abort());
addEventListener("keydown", event => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run();
});
chooseMode();
connect();
