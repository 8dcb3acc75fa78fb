// A chat whose tokens have the colour of the layer after which they left.

const at = (id) => document.getElementById(id);
const state = { colours: [], layers: 0, messages: [], running: null };

function element(kind, name, text) {
  const made = document.createElement(kind);
  made.className = name;
  made.textContent = text ?? "";
  return made;
}

function headers() {
  const key = at("key").value.trim();
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

// The colours of the layers, and the policies that suit the model.
async function begin() {
  const about = await (await fetch("page/depth.json")).json();
  state.colours = about.colours;
  state.layers = about.num_layers;
  at("model").textContent = about.model;
  at("exit").placeholder = about.exit;
  at("scale").append("layers ");
  about.colours.forEach((colour, layer) => {
    if (layer === 0) return;
    const mark = element("span", "", String(layer));
    mark.style.color = colour;
    at("scale").append(mark);
  });
  for (const policy of about.policies) {
    const option = document.createElement("option");
    option.value = policy;
    at("policies").append(option);
  }
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

// One answer: its text, a span for each token, and what is told below it.
class Answer {
  constructor(place, exit) {
    this.exit = exit;
    this.box = element("section", "answer");
    this.text = this.box.appendChild(element("div", "text"));
    this.told = this.box.appendChild(element("div", "told", exit || "…"));
    this.whole = "";
    this.pending = [];
    this.count = 0;
    this.depth = 0;
    this.first = 0;
    place.append(this.box);
  }

  async run(messages, signal) {
    const body = {
      messages,
      stream: true,
      stream_options: { include_usage: true },
      return_exit_layers: true,
      temperature: Number(at("temperature").value) || 0,
      ...(this.exit && { exit: this.exit }),
    };
    const request = { method: "POST", headers: headers(), body: JSON.stringify(body), signal };
    try {
      const answer = await fetch("v1/chat/completions", request);
      if (!answer.ok) throw new Error((await answer.json()).error.message);
      for await (const chunk of eventsOf(answer)) {
        if (chunk.error) throw new Error(chunk.error.message);
        for (const choice of chunk.choices) this.add(choice);
        if (chunk.usage) this.tell(chunk.usage.eecore);
      }
    } catch (error) {
      const stopped = error.name === "AbortError";
      this.box.append(element("div", stopped ? "told" : "error", stopped ? "stopped" : error.message));
    }
  }

  add(choice) {
    (choice.tokens ?? []).forEach((token, i) => {
      this.pending.push({ token, layer: choice.exit_layers[i], sure: choice.confidences[i] });
      this.count += 1;
      this.depth += choice.exit_layers[i];
    });
    this.first ||= performance.now();
    this.show(choice.delta.content ?? "");
    this.tell();
  }

  // Text comes with its tokens or after them: a character may need several.
  show(text) {
    this.whole += text;
    let left = text;
    while (left && this.pending.length) {
      const { token, layer, sure } = this.pending.shift();
      const ends = !this.pending.length && !left.startsWith(token);
      const piece = left.startsWith(token) ? token : ends ? left : "";
      left = left.slice(piece.length);
      if (piece) this.text.append(this.span(piece, layer, sure));
    }
    if (left) this.text.append(left);
    at("conversation").scrollTop = at("conversation").scrollHeight;
  }

  span(text, layer, sure) {
    const span = element("span", "", text);
    span.style.color = state.colours[layer];
    span.tabIndex = 0;
    span.title = `layer ${layer} of ${state.layers}, confidence ${sure?.toFixed(3) ?? "unknown"}`;
    span.setAttribute("aria-description", span.title);
    return span;
  }

  tell(usage) {
    if (!this.count) return;
    const seconds = (performance.now() - this.first) / 1000;
    const speed = this.count > 1 && seconds > 0 ? (this.count - 1) / seconds : 0;
    const parts = [
      usage?.contract ?? (this.exit || "the server's"),
      `${this.count} tokens`,
      `${speed.toFixed(0)} tokens/s`,
      `mean exit layer ${(this.depth / this.count).toFixed(1)} of ${state.layers}`,
    ];
    if (usage?.layers_skipped) parts.push(`${usage.layers_skipped} layers skipped`);
    if (usage?.drafted) parts.push(`${usage.accepted} of ${usage.drafted} drafts accepted`);
    this.told.textContent = parts.join(" · ");
  }
}

async function send() {
  const text = at("prompt").value.trim();
  if (!text || state.running) return;
  at("prompt").value = "";
  const talk = state.messages;
  talk.push({ role: "user", content: text });
  const place = element("div", "answers");
  at("conversation").append(element("p", "said", text), place);
  const exit = at("exit").value.trim();
  const answers = [new Answer(place, exit)];
  if (at("beside").checked) answers.push(new Answer(place, "full"));
  state.running = new AbortController();
  at("stop").hidden = false;
  const messages = [...talk];
  // One after the other: each has the machine to itself.
  for (const answer of answers) await answer.run(messages, state.running.signal);
  if (answers[0].whole) talk.push({ role: "assistant", content: answers[0].whole });
  else talk.pop(); // what was not answered was not said
  state.running = null;
  at("stop").hidden = true;
  at("prompt").focus();
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
at("stop").addEventListener("click", () => state.running?.abort());
at("clear").addEventListener("click", () => {
  state.running?.abort();
  state.messages = [];
  at("conversation").replaceChildren();
});
begin();
