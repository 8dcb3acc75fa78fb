// A chat that shows how each token was made, and the speed that it gained.

import { blocksOf } from "./markdown.js";

const MAX_TOKENS = 512; // tokens of an answer, unless the settings have another limit
const WARM_TOKENS = 64; // tokens of an answer that warms up and is not shown

const at = (id) => document.getElementById(id);
const state = { about: null, messages: [], running: null, seen: new Set(), warm: new Set() };

function element(kind, name, text) {
  const made = document.createElement(kind);
  if (name) made.className = name;
  made.textContent = text ?? "";
  return made;
}

// Modes in words

const WORDS = {
  full: () => ["Full depth", "all layers for every token"],
  auto: () => ["Auto", "drafts where that is faster, same text"],
  head: () => ["Draft head", "a small head drafts, same text"],
  lookup: () => ["Text lookup", "drafts what stood before, same text"],
  speculative: (layer) => [`${layer} layers draft`, "the others verify, same text"],
  "draft-verify": () => ["Thinned drafts", "all layers verify, same text"],
  fixed: (layer) => [`Only ${layer} layers`, "the others never run"],
  confident: (sure) => [`Early exit at ${Math.round(100 * sure)}%`, "once a layer is that sure"],
  calibrated: (measure) => [
    `Early exit (${measure || "softmax"})`,
    "once a layer is sure, by a measured threshold",
  ],
};

// A mode's name, and a description.
function wordsOf(exit) {
  const [name, rest] = exit.split(":");
  return WORDS[name]?.(...(rest ?? "").split(",")) ?? [exit, "a mode of your own"];
}

function knownMode(exit) {
  return state.about.policies.find((mode) => mode.exit === exit);
}

function offer(menu, exit) {
  if ([...menu.options].some((option) => option.value === exit)) return;
  const [label, words] = wordsOf(exit);
  const option = element("option", "", `${label}: ${words}`);
  option.value = exit;
  menu.append(option);
}

// The meaning of the colours in the shown answers and the next one.
function showLegend() {
  const { num_layers: layers, colours } = state.about;
  const next = isRacing() ? [at("rival").value] : [];
  const modes = new Set([...state.seen, at("mode").value, ...next]);
  const known = [...modes].map((exit) => knownMode(exit) ?? { lossless: false, lowest: 1 });
  const parts = [];
  if (known.some((mode) => mode.lossless)) {
    if (known.some((mode) => mode.lossless && mode.exit !== "full")) {
      parts.push(element("span", "key drafted", `drafted, and verified by all ${layers} layers`));
    }
    parts.push(element("span", "key whole", `computed by all ${layers} layers`));
  }
  const early = known.filter((mode) => !mode.lossless);
  if (early.length) {
    const lowest = Math.min(...early.map((mode) => mode.lowest), layers);
    const scale = element("span", "scale", `left after layer ${lowest}`);
    const bar = scale.appendChild(element("i"));
    const stops = colours.slice(lowest);
    bar.style.background = `linear-gradient(to right, ${[stops[0], ...stops].join(", ")})`;
    scale.append(`after all ${layers}`);
    parts.push(scale);
  }
  at("legend").replaceChildren(...parts);
  at("legend").hidden = !at("marks").checked;
  for (const menu of [at("mode"), at("rival")]) {
    menu.previousElementSibling.textContent = wordsOf(menu.value)[0];
  }
}

const isRacing = () => at("race").getAttribute("aria-pressed") === "true";

// A server's answer

function headers() {
  const key = at("key").value.trim();
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

// The events of a stream, one by one.
async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function asked(body, signal) {
  const request = { method: "POST", headers: headers(), body: JSON.stringify(body), signal };
  return fetch("v1/chat/completions", request);
}

async function refusalOf(answer) {
  if (answer.status === 401) return "This server wants a key: put it into the settings.";
  try {
    const { message, code } = (await answer.json()).error;
    return message + (code === "context_length_exceeded" ? ". New chat begins anew." : "");
  } catch {
    return `The server answered ${answer.status}.`;
  }
}

const wait = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));

// One answer: its text, and its statistics.
class Answer {
  constructor(place, exit, isLane) {
    this.exit = exit;
    this.box = place.appendChild(element("article", "answer"));
    const [label] = wordsOf(exit);
    this.box.setAttribute("aria-label", `Answer: ${label}`);
    if (isLane) {
      const head = this.box.appendChild(element("div", "lane"));
      head.append(element("h3", "", label));
      this.pace = head.appendChild(element("span", "pace"));
    }
    this.note = this.box.appendChild(element("p", "note"));
    this.text = this.box.appendChild(element("div", "text"));
    this.told = this.box.appendChild(element("p", "told"));
    this.events = [];
    this.note.hidden = true;
    this.empty();
  }

  empty() {
    this.whole = "";
    this.tokens = []; // {end, layer, sure}: each token's end in the text
    this.pending = [];
    this.count = 0;
    this.blocks = [];
    this.text.replaceChildren();
  }

  say(note) {
    this.note.textContent = note;
    this.note.hidden = !note;
  }

  get isLossless() {
    return this.usage ? this.usage.lossless : (knownMode(this.exit)?.lossless ?? false);
  }

  get seconds() {
    return this.events.length ? (this.events.at(-1).time - this.events[0].time) / 1000 : 0;
  }

  // Tokens a second, once the first one is there.
  get speed() {
    const count = this.events.length ? this.count - this.events[0].count : 0;
    return this.seconds > 0 ? count / this.seconds : 0;
  }

  async run(body, signal, onFirst) {
    this.box.setAttribute("aria-busy", "true");
    this.text.classList.add("waiting");
    try {
      let answer = await asked(body, signal);
      if (answer.status === 400 && body.max_completion_tokens) {
        // The end of the context may come before the limit.
        answer = await asked({ ...body, max_completion_tokens: undefined }, signal);
      }
      if (!answer.ok) throw new Error(await refusalOf(answer));
      for await (const chunk of eventsOf(answer)) {
        if (chunk.error) throw new Error(chunk.error.message);
        if (chunk.usage) this.usage = chunk.usage.eecore;
        for (const choice of chunk.choices) {
          this.reason = choice.finish_reason ?? this.reason;
          const count = choice.tokens?.length ?? 0;
          this.add(choice);
          if (!count) continue;
          if (!this.events.length) onFirst?.();
          this.events.push({ time: performance.now(), choice, count });
          this.showPace(this.speed);
        }
      }
    } catch (error) {
      if (error.name !== "AbortError") {
        const said = error instanceof TypeError ? "The server does not answer." : error.message;
        this.failed = true;
        this.box.append(element("p", "error", said));
        this.box.lastChild.setAttribute("role", "alert");
      }
    }
    this.stopped = signal.aborted;
    this.end();
  }

  // Show the answer again, at its own speed.
  async replay(signal) {
    this.empty();
    this.told.replaceChildren();
    this.text.classList.add("waiting");
    const start = performance.now();
    const first = this.events[0]?.time ?? 0;
    for (const { time, choice } of this.events) {
      const left = time - first - (performance.now() - start);
      if (left > 0 && !signal.aborted) await wait(left / 1000);
      this.add(choice);
      const passed = (time - first) / 1000;
      this.showPace(passed > 0 ? (this.count - this.events[0].count) / passed : 0);
    }
    this.end();
  }

  showPace(speed) {
    if (!this.pace || !speed) return;
    this.pace.replaceChildren(element("b", "", speed.toFixed(0)), " tokens/s");
  }

  add(choice) {
    (choice.tokens ?? []).forEach((token, i) => {
      this.pending.push({ token, layer: choice.exit_layers[i], sure: choice.confidences[i] });
      this.count += 1;
    });
    // Text comes with its tokens or after them: a character may need several.
    let left = choice.delta.content ?? "";
    while (left && this.pending.length) {
      const { token, layer, sure } = this.pending.shift();
      const isLast = !this.pending.length && !left.startsWith(token);
      const piece = left.startsWith(token) ? token : isLast ? left : "";
      left = left.slice(piece.length);
      this.whole += piece;
      if (piece) this.tokens.push({ end: this.whole.length, layer, sure });
    }
    if (left) {
      this.whole += left;
      if (this.tokens.length) this.tokens.at(-1).end = this.whole.length;
    }
    this.drawing ??= requestAnimationFrame(() => this.draw());
  }

  // Unchanged blocks stay.
  draw() {
    cancelAnimationFrame(this.drawing);
    this.drawing = null;
    const isBelow = isAtEnd();
    const nodes = blocksOf(this.whole);
    nodes.forEach((node, i) => {
      const stop = nodes[i + 1]?.start ?? this.whole.length;
      const old = this.blocks[i];
      if (old && old.stop === stop && old.tag === node.tag && i < nodes.length - 1) return;
      const drawn = this.built(node);
      if (old) old.drawn.replaceWith(drawn);
      else this.text.append(drawn);
      this.blocks[i] = { drawn, stop, tag: node.tag };
    });
    for (const { drawn } of this.blocks.splice(nodes.length)) drawn.remove();
    if (isBelow) toEnd();
  }

  built(node) {
    const made = element(node.tag);
    if (node.tag === "a") {
      made.href = node.href;
      made.target = "_blank";
      made.rel = "noopener noreferrer";
    }
    if (node.first > 1) made.start = node.first;
    for (const child of node.children) {
      if (child.text === undefined) made.append(this.built(child));
      else this.mark(made, child);
    }
    if (node.tag !== "pre") return made;
    const box = element("div", "code");
    const bar = box.appendChild(element("div", "bar"));
    const source = node.children.map((child) => child.text).join("");
    bar.append(element("span", "", node.language || "code"), copyButton("Copy code", () => source));
    made.tabIndex = 0;
    made.setAttribute("aria-label", `Code${node.language ? ` in ${node.language}` : ""}`);
    box.append(made);
    return box;
  }

  // A piece of text, each token of it marked by how it was made.
  mark(place, { text, at: begin }) {
    const { tokens } = this;
    let low = 0;
    for (let high = tokens.length; low < high; ) {
      const middle = (low + high) >> 1;
      if (tokens[middle].end <= begin) low = middle + 1;
      else high = middle;
    }
    for (let done = 0; done < text.length; low += 1) {
      const token = tokens[low];
      const stop = token ? Math.min(token.end - begin, text.length) : text.length;
      const piece = text.slice(done, stop);
      done = stop;
      if (!token) {
        place.append(piece);
        continue;
      }
      const span = place.appendChild(element("span", "", piece));
      this.paint(span, token);
    }
  }

  paint(span, { layer, sure }) {
    const { num_layers: layers, colours } = state.about;
    const isWhole = layer >= layers;
    if (this.isLossless) {
      span.className = isWhole ? "whole" : "drafted";
      span.title = isWhole
        ? `computed by all ${layers} layers`
        : `drafted${layer ? ` by ${layer} layers` : ""}, and verified by all ${layers} layers`;
    } else {
      span.className = "left";
      span.style.setProperty("--mark", colours[layer]);
      span.title = isWhole ? `all ${layers} layers` : `left after layer ${layer} of ${layers}`;
    }
    if (sure !== null && sure !== undefined) span.title += `, ${Math.round(100 * sure)}% sure`;
  }

  end() {
    this.draw();
    this.text.classList.remove("waiting");
    this.box.removeAttribute("aria-busy");
    const parts = this.summary();
    this.told.replaceChildren(...parts);
    if (this.whole) this.told.append(copyButton("Copy", () => this.whole));
    if (isAtEnd()) toEnd();
  }

  // The speed, and full depth's.
  summary() {
    const { usage } = this;
    const parts = [];
    const put = (text) => parts.push(element("span", "", text));
    if (this.stopped) parts.push(element("b", "", "Stopped"));
    else if (this.reason === "length") put(`cut at ${this.count} tokens (Settings: longest answer)`);
    if (!usage && this.count > 1) put(`${this.speed.toFixed(0)} tokens/s`);
    if (!usage) return parts;
    const isFull = usage.contract.startsWith("full:");
    if (usage.speedup && !this.pace) {
      const text = usage.lossless ? "same text" : "the text may differ";
      const isEqual = Math.abs(usage.speedup - 1) < 0.05;
      const times = isEqual ? "As fast as" : `${usage.speedup.toFixed(1)}×`;
      parts.push(element("b", "", `${times} full depth, ${text}`));
    }
    if (!this.pace && usage.tokens_per_s) {
      const full = usage.full_depth_tokens_per_s;
      const beside = full ? ` (full depth ${full.toFixed(0)})` : "";
      put(`${usage.tokens_per_s.toFixed(0)} tokens/s${beside}`);
    }
    if (isFull) put(`all ${usage.num_layers} layers for each token`);
    else if (usage.layers_per_token !== null) {
      put(`${usage.layers_per_token.toFixed(1)} layers a token (full depth ${usage.num_layers})`);
      if (usage.drafted) parts.at(-1).title = "Drafts are verified together: more layers, fewer passes";
    }
    if (usage.drafted) put(`${usage.accepted} of ${usage.drafted} drafts accepted`);
    return parts;
  }
}

function isAtEnd() {
  const main = at("scroll");
  return main.scrollHeight - main.scrollTop - main.clientHeight < 80;
}

function toEnd() {
  at("scroll").scrollTop = at("scroll").scrollHeight;
}

function copyButton(name, text) {
  const button = element("button", "quiet", "Copy");
  button.type = "button";
  button.setAttribute("aria-label", name);
  button.addEventListener("click", async () => {
    button.textContent = (await copied(text())) ? "Copied" : "Not copied";
    at("status").textContent = button.textContent;
    await wait(1.5);
    button.textContent = "Copy";
  });
  return button;
}

// Copies a text to the clipboard; whether that worked. Without https only the old way is available.
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.body.appendChild(element("textarea", "unseen"));
    area.value = text;
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

// Asking

function bodyOf(exit, messages, more) {
  const system = at("system").value.trim();
  const temperature = at("temperature").value.trim();
  return {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true },
    return_exit_layers: true,
    exit,
    max_completion_tokens: Number(at("limit").value) || undefined,
    ...more,
    ...(temperature && { temperature: Number(temperature) }),
  };
}

async function send(text) {
  if (!text || state.running) return;
  at("welcome").hidden = true;
  at("prompt").value = "";
  grow();
  const control = (state.running = new AbortController());
  const conversation = at("conversation");
  const place = element("div", isRacing() ? "answers two" : "answers");
  const turn = { role: "user", content: text };
  const talk = [...(state.about.remembers ? state.messages : []), turn];
  conversation.append(element("p", "said", text), place);
  state.seen.add(at("mode").value);
  if (isRacing()) state.seen.add(at("rival").value);
  toEnd();
  at("send").hidden = true;
  at("stop").hidden = false;
  at("status").textContent = "Answering";
  let answer;
  if (isRacing()) answer = await race(place, talk, control.signal);
  else {
    answer = new Answer(place, at("mode").value, false);
    await answer.run(bodyOf(answer.exit, talk), control.signal);
  }
  // An unanswered message is dropped; nothing is added to a conversation that was left.
  if (state.running === control) {
    if (answer.whole) state.messages.push(turn, { role: "assistant", content: answer.whole });
    ready(answer);
  }
}

function ready(answer) {
  const hadFocus = document.activeElement === at("stop") || document.activeElement === document.body;
  state.running = null;
  at("stop").hidden = true;
  at("send").hidden = false;
  if (answer) {
    const said = [...answer.told.querySelectorAll("b, span")].map((part) => part.textContent);
    at("status").textContent = `${answer.stopped ? "" : "Answered. "}${said.join(", ")}`;
  }
  if (hadFocus) at("prompt").focus();
}

// Two modes, the same question. They would slow each other down, so each runs alone: the slower one
// first, and then it is shown again at its own speed while the other one runs.
async function race(place, talk, signal) {
  const lanes = [at("mode").value, at("rival").value].map((exit) => new Answer(place, exit, true));
  const [first, second] = lanes[1].exit === "full" ? [lanes[1], lanes[0]] : lanes;
  for (const lane of lanes) {
    if (state.warm.has(lane.exit)) continue;
    lane.say("Warming up: the first passes of a mode are slower.");
    await warm(bodyOf(lane.exit, talk, { temperature: 0 }), signal);
    if (!signal.aborted) state.warm.add(lane.exit);
  }
  const same = { seed: Math.floor(Math.random() * 2 ** 31), temperature: 0 };
  first.say("Each has the machine to itself: this one runs first, and is shown again beside the other.");
  second.say("Waits, so that neither slows the other down.");
  await first.run(bodyOf(first.exit, talk, same), signal);
  if (signal.aborted || first.failed) {
    second.say("");
    return first;
  }
  first.say("Shown again, at its own speed.");
  second.say("Live.");
  let again;
  await second.run(bodyOf(second.exit, talk, same), signal, () => (again = first.replay(signal)));
  await again;
  first.say("");
  second.say("");
  if (!signal.aborted && !second.failed) {
    place.after(element("p", "verdict", verdict(first, second)));
    toEnd();
  }
  return second;
}

// Warm a mode up without showing it; errors show when it runs again.
async function warm(body, signal) {
  try {
    const limit = Math.min(body.max_completion_tokens ?? WARM_TOKENS, WARM_TOKENS);
    const answer = await asked({ ...body, max_completion_tokens: limit }, signal);
    await answer.text();
  } catch {} // stopped, or without a server
}

function verdict(...lanes) {
  const [slow, fast] = lanes.sort((a, b) => a.speed - b.speed);
  const same = lanes[0].whole === lanes[1].whole;
  const texts = same ? "Both wrote the same text." : "They wrote different texts.";
  if (!slow.speed) return texts;
  const [name, other] = [fast, slow].map((lane) => wordsOf(lane.exit)[0]);
  const times = fast.speed / slow.speed;
  const times_in_words = times < 1.05 ? "was as fast as" : `was ${times.toFixed(1)}× as fast as`;
  return `${name} ${times_in_words} ${other}. ${texts}`;
}

// The page

function grow() {
  const area = at("prompt");
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight}px`;
}

function welcome() {
  const { about } = state;
  at("welcome").hidden = false;
  at("hello").textContent = about.hello;
  at("about").textContent = about.says;
  at("prompts").replaceChildren(
    ...about.prompts.map((prompt) => {
      const item = element("li");
      const button = item.appendChild(element("button", "", prompt));
      button.type = "button";
      button.addEventListener("click", () => send(prompt));
      return item;
    }),
  );
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

async function begin() {
  const about = await (await fetch("page/depth.json")).json();
  state.about = about;
  document.title = `${about.model} · eecore`;
  at("temperature").placeholder = `${about.temperature}`;
  at("model").textContent = about.model;
  for (const menu of [at("mode"), at("rival")]) {
    for (const mode of about.policies) offer(menu, mode.exit);
  }
  at("limit").value = Math.min(MAX_TOKENS, about.max_model_len >> 1);
  at("mode").value = about.exit;
  at("rival").value = about.policies.find((mode) => mode.exit !== about.exit)?.exit ?? about.exit;
  document.body.classList.toggle("marked", at("marks").checked);
  try {
    at("theme").value = localStorage.getItem("eecore-theme") ?? "";
  } catch {} // the browser stores nothing
  setTheme(at("theme").value);
  welcome();
  showLegend();
  at("prompt").focus();
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send(at("prompt").value.trim());
});
at("prompt").addEventListener("input", grow);
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send(at("prompt").value.trim());
  }
});
at("stop").addEventListener("click", () => state.running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !at("settings").open) state.running?.abort();
});
at("clear").addEventListener("click", () => {
  state.running?.abort();
  state.messages = [];
  state.seen.clear();
  showLegend();
  at("conversation").replaceChildren();
  ready(null);
  welcome();
  at("prompt").focus();
});
at("race").addEventListener("click", () => {
  at("race").setAttribute("aria-pressed", String(!isRacing()));
  document.body.classList.toggle("racing", isRacing());
  at("against").hidden = !isRacing();
  at("send").textContent = isRacing() ? "Start" : "Send";
  showLegend();
});
for (const menu of [at("mode"), at("rival")]) menu.addEventListener("change", showLegend);
at("adjust").addEventListener("click", () => at("settings").showModal());
at("own").addEventListener("change", async () => {
  const exit = at("own").value.trim();
  at("own-error").textContent = "";
  if (!exit) return;
  if (!knownMode(exit)) {
    // The server lists a mode under the model's name as well, and states its promise.
    const name = `${state.about.model}:${exit.replace(/[:,]/g, "-")}`;
    const path = name.split("/").map(encodeURIComponent).join("/");
    const answer = await fetch(`v1/models/${path}`, { headers: headers() });
    if (!answer.ok) {
      at("own-error").textContent = await refusalOf(answer);
      return;
    }
    const { contract } = await answer.json();
    const lossless = contract.startsWith("full:") || contract.endsWith("lossless");
    state.about.policies.push({ exit, lossless, lowest: 1 });
  }
  for (const menu of [at("mode"), at("rival")]) offer(menu, exit);
  at("mode").value = exit;
  showLegend();
});
at("theme").addEventListener("change", () => {
  setTheme(at("theme").value);
  try {
    localStorage.setItem("eecore-theme", at("theme").value);
  } catch {} // the browser stores nothing
});
at("marks").addEventListener("change", () => {
  document.body.classList.toggle("marked", at("marks").checked);
  showLegend();
});
begin();
