"use strict";
// Texts of the model are set as text, never as markup. Nothing is asked of any other host, and nothing is kept.
const NUM_ALTERNATIVES = 5;
const LIMITS = [0.5, 0.2, 0.05, 0.01];
const at = (id) => document.getElementById(id);
let messages = [];
let running = null; // the AbortController of the answer under way

function add(parent, name, className, text) {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

function addMessage(who, text) {
  const article = add(at("talk"), "article");
  add(article, "h2", "", who);
  const body = add(article, "div", "text", text);
  body.dir = "auto";
  return { article, body };
}

function percent(logprob) {
  const share = Math.exp(logprob);
  if (share < 0.001) return "<0.1%";
  return share >= 0.9995 ? ">99.9%" : `${(100 * share).toFixed(1)}%`;
}

// The words of one answer. A character whose bytes are spread over tokens is shown with the last of them.
class Words {
  constructor(body) {
    this.body = body;
    this.decoder = new TextDecoder();
    this.spans = [];
    this.thoughts = null; // the element that holds the reasoning, once it has ended
  }

  add(token) {
    let text = this.decoder.decode(new Uint8Array(token.bytes), { stream: true });
    if (this.spans.length === 0) text = text.trimStart();
    if (text === "") return;
    const level = LIMITS.filter((limit) => Math.exp(token.logprob) < limit).length;
    const word = text.trimStart() || text; // the space before a word has no tint
    this.body.append(text.slice(0, text.length - word.length));
    const span = add(this.body, "span", `t l${level}`, word);
    span.said = text;
    span.tabIndex = this.spans.length === 0 ? 0 : -1;
    span.token = token;
    this.spans.push(span);
  }

  // Put the reasoning aside, with its tags and the space around it.
  fold() {
    let rest = this.body.textContent.match(/^[^]*?<\/think>\s*/)?.[0].length ?? 0;
    const parts = [...this.body.childNodes];
    this.thoughts = document.createElement("details");
    add(this.thoughts, "summary", "", "Reasoning");
    for (const part of parts) {
      rest -= part.textContent.length;
      if (rest < 0) break;
      this.thoughts.append(part);
    }
    this.body.prepend(this.thoughts);
  }

  // A stop string is not part of the text, though its tokens were chosen.
  cut(text) {
    let rest = text.length;
    for (const part of [...this.body.childNodes].filter((part) => part !== this.thoughts)) {
      if (part.textContent.length > rest) part.textContent = part.textContent.slice(0, rest);
      rest -= part.textContent.length;
      if (part.textContent === "") part.remove();
    }
  }
}

function look(span) {
  const panel = at("look");
  panel.textContent = "";
  add(panel, "b", "", JSON.stringify(span.said));
  panel.append(` had ${percent(span.token.logprob)}`);
  const others = span.token.top_logprobs.filter((other) => other.token !== span.token.token);
  if (others.length) panel.append("; others: ");
  panel.append(others.map((other) => `${JSON.stringify(other.token)} ${percent(other.logprob)}`).join(", "));
}

function asked() {
  const body = { messages, stream: true, logprobs: true, top_logprobs: NUM_ALTERNATIVES };
  body.stream_options = { include_usage: true };
  for (const name of ["temperature", "seed"]) if (at(name).value !== "") body[name] = Number(at(name).value);
  return JSON.stringify(body);
}

async function* pieces(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the server closed the connection");
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      const piece = JSON.parse(line.slice("data: ".length));
      if (piece.error) throw new Error(piece.error.message);
      yield piece;
    }
  }
}

// Keeps the end in view until the reader scrolls up.
function follower() {
  const page = document.documentElement;
  page.scrollTop = page.scrollHeight;
  let last = page.scrollTop;
  return () => {
    if (page.scrollTop < last) return;
    page.scrollTop = page.scrollHeight;
    last = page.scrollTop;
  };
}

async function answer(article, body) {
  const words = new Words(body);
  const headers = { "Content-Type": "application/json" };
  if (at("key").value) headers.Authorization = `Bearer ${at("key").value}`;
  let text = "";
  let reasoned = false;
  const about = [];
  const follow = follower();
  try {
    const options = { method: "POST", headers, body: asked(), signal: running.signal };
    const response = await fetch("/v1/chat/completions", options);
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const piece of pieces(response)) {
      const [choice] = piece.choices;
      if (choice) {
        const isFirst = text === "";
        text += choice.delta.content ?? "";
        reasoned ||= Boolean(choice.delta.reasoning_content);
        choice.logprobs.content.forEach((token) => words.add(token));
        if (isFirst && text && !body.textContent.startsWith(text.trimStart())) words.fold();
        if (choice.finish_reason === "length") about.push("cut at its limit");
      } else {
        about.push(`${piece.usage.completion_tokens} tokens`, `seed ${piece.seed}`);
      }
      follow();
    }
  } catch (error) {
    if (error.name === "AbortError") about.push("stopped");
    else add(article, "p", "about fault", error.message);
  }
  if (text || !reasoned) words.cut(text);
  if (about.length) add(article, "p", "about", about.join(", "));
  follow();
  return text;
}

async function send() {
  const text = at("message").value;
  if (running || text.trim() === "") return;
  addMessage("You", text);
  const { article, body } = addMessage(document.title);
  messages.push({ role: "user", content: text });
  at("message").value = "";
  running = new AbortController();
  at("send").hidden = true;
  at("stop").hidden = false;
  const mine = messages;
  const told = await answer(article, body);
  if (told) mine.push({ role: "assistant", content: told });
  else mine.pop();
  running = null;
  at("send").hidden = false;
  at("stop").hidden = true;
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
at("stop").addEventListener("click", () => running?.abort());
at("again").addEventListener("click", () => {
  running?.abort();
  messages = [];
  at("talk").textContent = "";
  at("message").focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
for (const name of ["pointerover", "focusin"]) {
  at("talk").addEventListener(name, (event) => {
    if (event.target.token) look(event.target);
  });
}
at("talk").addEventListener("keydown", (event) => {
  const step = { ArrowLeft: "previousElementSibling", ArrowRight: "nextElementSibling" }[event.key];
  const next = step && event.target.token && event.target[step];
  if (!next) return;
  event.preventDefault();
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
});
