// A chat that shows which tokens were drafted or exited early, and the speed that this gained.

const MAX_TOKENS = 512; // tokens of an answer, unless the settings have another limit
const WARM_TOKENS = 64; // tokens of an answer that warms up and is not shown
const RACE_SECONDS = 1; // a shorter run is repeated, and its median counts
const RACE_RUNS = 5;

const at = (id) => document.getElementById(id);
const state = { about: null, messages: [], running: null, warm: new Set() };

function element(kind, name, text) {
  const made = document.createElement(kind);
  if (name) made.className = name;
  made.textContent = text ?? "";
  return made;
}

// Modes in words: a name, and a description.

const WORDS = {
  full: () => ["Full depth", "all layers for every token"],
  auto: () => ["Auto", "drafts where that is faster; the text is full depth's"],
  head: () => ["Draft head", "a small head drafts, all layers verify"],
  lookup: () => ["Text lookup", "drafts what stood before, all layers verify"],
  speculative: (layer) => [`${layer} layers draft`, "all layers verify"],
  "draft-verify": () => ["Thinned drafts", "all layers verify"],
  fixed: (layer) => [`Only ${layer} layers`, "the others never run; the text may differ"],
  confident: (sure) => [`Exit at ${Math.round(100 * sure)}%`, "once a layer is sure; the text may differ"],
  calibrated: (measure) => [
    `Exit by ${measure || "softmax"}`,
    "once a layer is sure, by a measured threshold; the text may differ",
  ],
};

function wordsOf(exit) {
  const [name, rest] = exit.split(":");
  return WORDS[name]?.(...(rest ?? "").split(",")) ?? [exit, "a mode of your own"];
}

const modeOf = (exit) => state.about.policies.find((mode) => mode.exit === exit);
const isRacing = () => at("race").getAttribute("aria-pressed") === "true";

function showMode() {
  const chosen = isRacing() ? [at("mode").value, at("rival").value] : [at("mode").value];
  at("means").textContent = chosen.map((exit) => wordsOf(exit).join(": ")).join(" · ");
}

// The meaning of the colours that are shown; nothing where there are none.
function showLegend() {
  const { num_layers: layers, colours, policies } = state.about;
  const shown = (kind) => at("conversation").querySelector(`.text .${kind}`);
  const parts = [];
  if (shown("drafted")) {
    parts.push(element("span", "key", `drafted, and verified by all ${layers} layers`));
  }
  if (shown("early")) {
    const lowest = Math.min(...policies.filter((mode) => !mode.lossless).map((mode) => mode.lowest));
    const scale = element("span", "scale", `exited after layer ${lowest} `);
    const bar = scale.appendChild(element("i"));
    bar.style.background = `linear-gradient(to right, ${colours.slice(lowest - 1, -1).join(", ")})`;
    scale.append(`after layer ${layers - 1}`);
    parts.push(scale);
  }
  at("legend").replaceChildren(...parts);
  at("legend").hidden = !parts.length;
}

// A server's answer

function asked(body, signal) {
  const key = at("key").value.trim();
  const headers = { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
  return fetch("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
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

async function refusalOf(answer) {
  if (answer.status === 401) return "This server wants a key: put it into the settings.";
  try {
    const { message, code } = (await answer.json()).error;
    return message + (code === "context_length_exceeded" ? ". New chat begins anew." : "");
  } catch {
    return `The server answered ${answer.status}.`;
  }
}

// Code blocks, code, bold words and headings; the rest is text as it is. No text becomes markup.
const MARKUP =
  /^```[^\n]*\n(?<pre>[^]*?)(?:\n```[^\n]*\n?|$(?![^]))|`(?<code>[^`\n]+)`|\*\*(?<strong>\S[^*\n]*)\*\*|^#{1,6} +(?<h3>[^\n]+)/gm;

// The pieces of a text: a tag, and where its characters are.
function piecesOf(text) {
  const pieces = [];
  let plain = 0;
  for (const match of text.matchAll(MARKUP)) {
    const [tag, inner] = Object.entries(match.groups).find(([, found]) => found !== undefined);
    const from = match.index + match[0].indexOf(inner, tag === "pre" ? match[0].indexOf("\n") + 1 : 0);
    pieces.push({ tag: "", from: plain, to: match.index }, { tag, from, to: from + inner.length });
    plain = match.index + match[0].length;
  }
  return [...pieces, { tag: "", from: plain, to: text.length }];
}

class Answer {
  constructor(place, exit, isLane) {
    this.exit = exit;
    this.isLane = isLane;
    this.box = place.appendChild(element("article", "answer"));
    const [label] = wordsOf(exit);
    this.box.setAttribute("aria-label", `Answer: ${label}`);
    if (isLane) this.box.append(element("h3", "", label));
    this.note = this.box.appendChild(element("p", "told"));
    this.thought = this.box.appendChild(element("details", "thought"));
    this.thought.append(element("summary"), element("div"));
    this.thought.hidden = true;
    this.text = this.box.appendChild(element("div", "text"));
    this.told = this.box.appendChild(element("p", "told"));
    this.whole = "";
    this.reasoning = "";
    this.tokens = []; // {end, layer, sure}: each token's end in the text
    this.pending = [];
  }

  async run(body, signal) {
    this.box.setAttribute("aria-busy", "true");
    this.note.textContent = "";
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
        this.usage = chunk.usage ?? this.usage;
        for (const choice of chunk.choices) {
          this.reason = choice.finish_reason ?? this.reason;
          this.add(choice);
        }
      }
    } catch (error) {
      this.failed = true;
      if (error.name !== "AbortError") {
        const said = error instanceof TypeError ? "The server does not answer." : error.message;
        this.box.append(element("p", "error", said));
        this.box.lastChild.setAttribute("role", "alert");
      }
    }
    this.draw();
    const isBelow = isAtEnd();
    this.text.classList.remove("waiting");
    this.box.removeAttribute("aria-busy");
    const told = [...(signal.aborted ? ["Stopped"] : []), ...this.summary()];
    this.told.replaceChildren(...told.map((part) => element("span", "", part)));
    if (isBelow) toEnd();
  }

  add(choice) {
    (choice.tokens ?? []).forEach((token, i) => {
      this.pending.push({ token, layer: choice.exit_layers[i], sure: choice.confidences[i] });
    });
    if (choice.delta.reasoning_content) {
      this.reasoning += choice.delta.reasoning_content;
      this.pending = []; // a thought has no colours
    }
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
    this.whole += left;
    if (left && this.tokens.length) this.tokens.at(-1).end = this.whole.length;
    this.drawing ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    cancelAnimationFrame(this.drawing);
    this.drawing = null;
    const isBelow = isAtEnd();
    const [summary, reasoning] = this.thought.children;
    this.thought.hidden = !this.reasoning;
    summary.textContent = this.whole ? "Thought" : "Thinking";
    reasoning.textContent = this.reasoning;
    let next = 0; // the token of the next character
    const nodes = piecesOf(this.whole).flatMap(({ tag, from, to }) => {
      const inner = [];
      for (let begin = from; begin < to; ) {
        while (next < this.tokens.length && this.tokens[next].end <= begin) next += 1;
        const token = this.tokens[next];
        const end = Math.min(token?.end ?? to, to);
        inner.push(...this.marked(this.whole.slice(begin, end), token));
        begin = end;
      }
      if (!tag) return inner;
      const made = element(tag);
      made.append(...inner);
      return [made];
    });
    this.text.replaceChildren(...nodes);
    showLegend();
    if (isBelow) toEnd();
  }

  // A token's text: coloured where it was drafted or exited early, without the spaces around it.
  marked(text, token) {
    const { num_layers: layers, colours } = state.about;
    const [, before, word, after] = /^(\s*)([^]*?)(\s*)$/.exec(text);
    if (!token || token.layer >= layers || !word) return [text];
    const isLossless = this.usage?.eecore.lossless ?? modeOf(this.exit).lossless;
    const span = element("span", isLossless ? "drafted" : "early", word);
    if (isLossless) {
      span.title = `drafted${token.layer ? ` by ${token.layer} layers` : ""}, and verified by all ${layers} layers`;
    } else {
      span.style.setProperty("--mark", colours[token.layer]);
      span.title = `exited after layer ${token.layer} of ${layers}`;
    }
    if (Number.isFinite(token.sure)) span.title += `, ${Math.round(100 * token.sure)}% sure`;
    return [before, span, after];
  }

  // The speed beside full depth's, and why.
  summary() {
    if (!this.usage) return [];
    const { completion_tokens: count, eecore: usage } = this.usage;
    const { num_layers: layers, speedup, tokens_per_s: speed, full_depth_tokens_per_s: full } = usage;
    const parts = [];
    if (speedup && !this.isLane) {
      const isEqual = Math.abs(speedup - 1) < 0.05;
      const times = isEqual ? "As fast as" : `${speedup.toFixed(1)}× as fast as`;
      parts.push(`${times} full depth, ${usage.lossless ? "same text" : "the text may differ"}`);
    }
    const beside = speedup && !this.isLane ? ` beside ${full.toFixed(0)}` : "";
    parts.push(`${speed.toFixed(0)} tokens/s${beside}`);
    if (!usage.lossless && usage.layers_per_token !== null) {
      parts.push(`${usage.layers_per_token.toFixed(1)} of ${layers} layers a token`);
    } else if (usage.drafted) {
      parts.push(
        `${usage.full_passes} passes of all ${layers} layers for ${count - 1} tokens: ` +
          `${usage.accepted} of ${usage.drafted} drafts accepted`,
      );
    }
    if (this.reason === "length") parts.push(`cut after ${count} tokens`);
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

// Asking

function bodyOf(exit, messages) {
  const system = at("system").value.trim();
  const temperature = at("temperature").value.trim();
  return {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true },
    return_exit_layers: true,
    exit,
    max_completion_tokens: Number(at("limit").value) || undefined,
    ...(temperature && { temperature: Number(temperature) }),
  };
}

async function send(text) {
  if (!text || state.running) return;
  at("welcome").hidden = true;
  at("prompt").value = "";
  grow();
  const control = (state.running = new AbortController());
  const place = element("div", isRacing() ? "answers two" : "answers");
  const turn = { role: "user", content: text };
  const talk = [...(state.about.remembers ? state.messages : []), turn];
  at("conversation").append(element("p", "said", text), place);
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
    if (answer.whole) {
      const { whole: content, reasoning: reasoning_content } = answer;
      state.messages.push(turn, { role: "assistant", content, ...(reasoning_content && { reasoning_content }) });
    }
    at("status").textContent = `Answered. ${answer.told.innerText}`;
    ready();
  }
}

function ready() {
  const hadFocus = [at("stop"), document.body].includes(document.activeElement);
  state.running = null;
  at("stop").hidden = true;
  at("send").hidden = false;
  if (hadFocus) at("prompt").focus();
}

// Two modes, the same question. They would slow each other down, so one runs after the other.
async function race(place, talk, signal) {
  const lanes = [at("mode").value, at("rival").value].map((exit) => new Answer(place, exit, true));
  const seed = Math.floor(Math.random() * 2 ** 31);
  lanes[1].note.textContent = "Runs next, so that neither slows the other down.";
  for (const lane of lanes) {
    const body = { ...bodyOf(lane.exit, talk), temperature: 0, seed };
    lane.note.textContent = "Warming up.";
    await unseen(body, signal, state.warm.has(lane.exit) ? 1 : WARM_TOKENS); // the prompt too
    state.warm.add(lane.exit);
    await lane.run(body, signal);
    if (signal.aborted || lane.failed) return lane;
    const speeds = [lane.usage.eecore.tokens_per_s];
    const seconds = lane.usage.completion_tokens / speeds[0];
    while (speeds.length < RACE_RUNS && speeds.length * seconds < RACE_SECONDS) {
      const usage = await unseen(body, signal);
      if (!usage) return lane;
      speeds.push(usage.eecore.tokens_per_s);
    }
    lane.speed = speeds.sort((a, b) => a - b)[speeds.length >> 1];
    lane.told.firstChild.textContent = `${lane.speed.toFixed(0)} tokens/s`;
  }
  place.after(resultOf(lanes));
  toEnd();
  return lanes[0];
}

// The winner in words, and the speeds as bars.
function resultOf(lanes) {
  const [fast, slow] = [...lanes].sort((a, b) => b.speed - a.speed);
  const [name, other] = [fast, slow].map((lane) => wordsOf(lane.exit)[0]);
  const times = fast.speed / slow.speed;
  const texts = fast.whole === slow.whole ? "Both wrote the same text." : "They wrote different texts.";
  const isDraw = times < 1.05;
  const outcome = isDraw ? "A draw" : `${name} wins: ${times.toFixed(1)}× as fast as ${other}`;
  const result = element("div", "result");
  result.append(element("p", "verdict", `${outcome}. ${texts}`));
  for (const lane of lanes) {
    const row = result.appendChild(element("div", lane === fast && !isDraw ? "pace winner" : "pace"));
    const bar = element("span", "bar");
    bar.append(element("i"));
    bar.firstChild.style.setProperty("--share", lane.speed / fast.speed);
    row.append(element("span", "", wordsOf(lane.exit)[0]), bar);
    row.append(element("span", "", `${lane.speed.toFixed(0)} tokens/s`));
  }
  return result;
}

// The usage of an answer that is not shown; nothing where it was stopped or failed.
async function unseen(body, signal, limit = body.max_completion_tokens) {
  const whole = { stream: false, stream_options: undefined, max_completion_tokens: limit };
  try {
    return (await (await asked({ ...body, ...whole }, signal)).json()).usage;
  } catch {
    return null;
  }
}

// The page

function grow() {
  const area = at("prompt");
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight}px`;
}

async function begin() {
  const about = (state.about = await (await fetch("page/depth.json")).json());
  document.title = `${about.model} · eecore`;
  for (const name of ["model", "facts", "hello", "says"]) at(name).textContent = about[name];
  at("temperature").placeholder = `${about.temperature}`;
  for (const menu of [at("mode"), at("rival")]) {
    for (const { exit } of about.policies) menu.append(new Option(wordsOf(exit)[0], exit));
    menu.addEventListener("change", showMode);
  }
  at("limit").value = Math.min(MAX_TOKENS, about.max_model_len >> 1);
  at("mode").value = about.exit;
  const others = about.policies.map((mode) => mode.exit).filter((exit) => exit !== about.exit);
  at("rival").value = others.includes("full") ? "full" : (others[0] ?? about.exit);
  for (const prompt of about.prompts) {
    const button = at("prompts").appendChild(element("li")).appendChild(element("button", "", prompt));
    button.type = "button";
    button.addEventListener("click", () => send(prompt));
  }
  at("welcome").hidden = false;
  showMode();
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
  at("conversation").replaceChildren();
  showLegend();
  ready();
  at("welcome").hidden = false;
  at("prompt").focus();
});
at("race").addEventListener("click", () => {
  at("race").setAttribute("aria-pressed", String(!isRacing()));
  document.body.classList.toggle("racing", isRacing());
  at("against").hidden = !isRacing();
  at("send").textContent = isRacing() ? "Start" : "Send";
  showMode();
});
at("adjust").addEventListener("click", () => at("settings").showModal());
begin();
