// Texts of the model are never markup: markdown.js draws them. Nothing is asked of any other host. The chat is kept for
// this tab alone, over a reload; the API key is not.
const NUM_ALTERNATIVES = 5;
const LIMITS = [0.5, 0.2, 0.05, 0.01];
const PLACE = "llmcli-chat"; // in the session's storage
const SETTINGS = ["system", "temperature", "seed"];
const COPIED_MS = 2000;
const at = (id) => document.getElementById(id);
let turns = []; // as `newTurn` makes them: `text` is the answer, `tokens` are those of `reasoning` and text
let running = null; // the AbortController of the answer under way

const noAnswer = () => ({ text: "", reasoning: "", tokens: [], about: "", fault: "" });
const newTurn = (asked) => ({ asked, ...noAnswer(), tries: 0 });

function percent(logprob) {
  const share = Math.exp(logprob);
  if (share < 0.001) return "<0.1%";
  return share >= 0.9995 ? ">99.9%" : `${(100 * share).toFixed(1)}%`;
}

// The tokens of one answer as texts. A character whose bytes are spread over tokens belongs to the last of them.
class Tokens {
  constructor() {
    this.decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    this.list = [];
  }

  add(token) {
    const said = this.decoder.decode(new Uint8Array(token.bytes), { stream: true });
    const others = token.top_logprobs.filter((other) => other.token !== token.token);
    this.list.push({ said, logprob: token.logprob, others: others.map((other) => [other.token, other.logprob]) });
  }
}

// A turn's `text` or `reasoning` on the page. Blocks that nothing later can change stay as they are while it grows.
class Drawing {
  constructor(turn, name, body) {
    this.turn = turn;
    this.name = name;
    this.body = body;
    this.done = 0; // characters that are drawn for good
    this.numKept = 0; // and the nodes that show them
  }

  draw() {
    const text = this.turn[this.name];
    const focused = this.body.contains(document.activeElement) ? document.activeElement.token : null;
    while (this.body.childNodes.length > this.numKept) this.body.lastChild.remove();
    const ends = this.tokenEnds();
    const paint = (parent, start, end) => this.paint(ends, parent, start, end);
    const isMarkdown = at("markdown").checked;
    this.body.classList.toggle("plain", !isMarkdown);
    const blocks = isMarkdown ? blocksOf(linesOf(text, this.done)) : [];
    const lastLine = text.lastIndexOf("\n") + 1; // it may still become anything
    let place = this.done;
    blocks.forEach((block, index) => {
      paint(this.body, place, block.start);
      if (index === blocks.length - 1 && block.start < lastLine) {
        this.done = block.start;
        this.numKept = this.body.childNodes.length;
      }
      block.draw(this.body, paint);
      place = block.end;
    });
    paint(this.body, place, text.length);
    const words = [...this.body.getElementsByClassName("t")];
    if (words.length && !words.some((one) => one.tabIndex === 0)) words[0].tabIndex = 0;
    if (focused) words.find((one) => one.token === focused)?.focus({ preventScroll: true });
  }

  // Where each token ends in the text, below 0 for those before it; none if they do not tell it.
  tokenEnds() {
    const { reasoning, tokens } = this.turn;
    const whole = tokens.map((token) => token.said).join("");
    const first = this.name === "text" && reasoning ? whole.indexOf(reasoning) + reasoning.length : 0;
    const start = whole.indexOf(this.turn[this.name], first);
    let end = -start;
    return start < 0 ? [] : tokens.map((token) => (end += token.said.length));
  }

  paint(ends, parent, start, end) {
    let [low, high] = [0, ends.length]; // the first token that ends after `start`
    while (low < high) {
      const middle = (low + high) >> 1;
      if (ends[middle] > start) high = middle;
      else low = middle + 1;
    }
    for (let place = start; place < end; low += 1) {
      const stop = Math.min(end, ends[low] ?? end);
      const said = this.turn[this.name].slice(place, stop);
      const token = this.turn.tokens[low];
      const word = said.trimStart() || (token?.said.trim() === "" ? said : ""); // the space before it has no tint
      parent.append(said.slice(0, said.length - word.length));
      if (low < ends.length && word !== "") {
        const level = LIMITS.filter((limit) => Math.exp(token.logprob) < limit).length;
        const span = add(parent, "span", `t l${level}`, word);
        span.tabIndex = -1;
        span.token = token;
      } else parent.append(word);
      place = stop;
    }
  }
}

// A turn on the page; the answer's article can `update`, while it grows and when it has ended.
function show(turn) {
  const question = add(at("talk"), "article");
  add(question, "h2", "", "You");
  add(question, "div", "text plain", turn.asked).dir = "auto";
  const article = add(at("talk"), "article");
  add(article, "h2", "", document.title);
  const details = add(article, "details", "reasoning");
  add(details, "summary", "", "Reasoning");
  const reasoning = add(details, "div", "text");
  const body = add(article, "div", "text answer");
  reasoning.dir = body.dir = "auto";
  const ends = add(article, "div");
  const tools = add(article, "div", "tools");
  const copy = add(tools, "button", "copy", "Copy");
  copy.copied = () => turn.text;
  const redo = add(tools, "button", "redo", "Regenerate");
  redo.addEventListener("click", () => answerAgain(turn, article));
  for (const button of [copy, redo]) button.type = "button";
  let drawings = [];
  article.update = () => {
    details.hidden = turn.reasoning === "";
    ends.textContent = "";
    if (turn.fault) add(ends, "p", "about fault", turn.fault);
    if (turn.about) add(ends, "p", "about", turn.about);
    copy.hidden = turn.text === "";
    for (const drawing of drawings) drawing.draw();
  };
  article.redraw = () => {
    reasoning.textContent = body.textContent = "";
    drawings = [new Drawing(turn, "reasoning", reasoning), new Drawing(turn, "text", body)];
    article.update();
  };
  article.redraw();
  return article;
}

function look(span) {
  const panel = at("look");
  panel.textContent = "";
  add(panel, "b", "", JSON.stringify(span.token.said));
  panel.append(` had ${percent(span.token.logprob)}`);
  const others = span.token.others.map(([said, logprob]) => `${JSON.stringify(said)} ${percent(logprob)}`);
  if (others.length) panel.append(`; others: ${others.join(", ")}`);
}

// The conversation up to the turn's question. A question without an answer is left out.
function messagesTo(turn) {
  const messages = [];
  if (at("system").value.trim() !== "") messages.push({ role: "system", content: at("system").value });
  for (const each of turns.slice(0, turns.indexOf(turn)).filter((one) => one.text !== "")) {
    messages.push({ role: "user", content: each.asked }, { role: "assistant", content: each.text });
  }
  return [...messages, { role: "user", content: turn.asked }];
}

function bodyFor(turn) {
  const body = { messages: messagesTo(turn), stream: true, logprobs: true, top_logprobs: NUM_ALTERNATIVES };
  body.stream_options = { include_usage: true };
  if (at("temperature").value !== "") body.temperature = Number(at("temperature").value);
  if (at("seed").value !== "") body.seed = Number(at("seed").value) + turn.tries; // another answer, again repeatable
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

async function answer(turn, article, follow) {
  const tokens = new Tokens();
  Object.assign(turn, noAnswer(), { tokens: tokens.list });
  const headers = { "Content-Type": "application/json" };
  if (at("key").value) headers.Authorization = `Bearer ${at("key").value}`;
  const about = [];
  let isDrawn = true; // at most once for each picture on the screen
  const draw = () => {
    if (isDrawn) return;
    isDrawn = true;
    article.update();
    follow();
  };
  article.redraw();
  try {
    const options = { method: "POST", headers, body: bodyFor(turn), signal: running.signal };
    const response = await fetch("/v1/chat/completions", options);
    if (response.status === 401) {
      at("settings").open = true;
      at("key").focus();
    }
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const piece of pieces(response)) {
      const [choice] = piece.choices;
      if (choice) {
        turn.reasoning += choice.delta.reasoning_content ?? "";
        turn.text += choice.delta.content ?? "";
        choice.logprobs?.content.forEach((token) => tokens.add(token));
        if (choice.finish_reason === "length") about.push("cut at its limit");
      } else {
        about.push(`${piece.usage.completion_tokens} tokens`, `seed ${piece.seed}`);
      }
      if (isDrawn) requestAnimationFrame(draw);
      isDrawn = false;
    }
  } catch (error) {
    if (error.name === "AbortError") about.push("stopped");
    else turn.fault = error.message;
  }
  turn.about = about.join(", ");
  isDrawn = false;
  draw();
}

async function run(turn, article) {
  running = new AbortController();
  at("talk").setAttribute("aria-busy", "true"); // read aloud when it is whole
  at("send").hidden = true;
  at("stop").hidden = false;
  keep();
  const follow = follower();
  await answer(turn, article, follow);
  running = null;
  at("talk").removeAttribute("aria-busy"); // shows the buttons, too
  follow();
  at("send").hidden = false;
  at("stop").hidden = true;
  keep();
}

function send() {
  const text = at("message").value;
  if (running || text.trim() === "") return;
  const turn = newTurn(text);
  turns.push(turn);
  at("message").value = "";
  run(turn, show(turn));
}

function answerAgain(turn, article) {
  if (running) return;
  turn.tries += 1;
  at("message").focus(); // the button is hidden now
  run(turn, article);
}

// Keep the chat for a reload. If it is too large, the oldest answers lose their tints first.
function keep() {
  const settings = Object.fromEntries(SETTINGS.map((name) => [name, at(name).value]));
  const state = { settings, markdown: at("markdown").checked, turns: [...turns] };
  for (let index = -1; index < turns.length; index += 1) {
    if (index >= 0) state.turns[index] = { ...turns[index], tokens: [] };
    try {
      sessionStorage.setItem(PLACE, JSON.stringify(state));
      return;
    } catch {
      // it is full, or switched off
    }
  }
}

function restore() {
  let state = null;
  try {
    state = JSON.parse(sessionStorage.getItem(PLACE));
  } catch {
    return; // switched off
  }
  if (!state) return;
  for (const name of SETTINGS) at(name).value = state.settings[name];
  at("markdown").checked = state.markdown;
  turns = state.turns;
  for (const turn of turns) {
    if (turn.about === "" && turn.fault === "") turn.about = "stopped"; // by the reload
    show(turn);
  }
  follower();
}

async function copy(button) {
  const text = button.copied();
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without https browsers have no clipboard, but for this machine's own pages.
    const area = add(document.body, "textarea", "unseen");
    area.value = text;
    area.focus({ preventScroll: true });
    area.select();
    const isDone = document.execCommand("copy");
    area.remove();
    button.focus({ preventScroll: true });
    if (!isDone) {
      at("look").textContent = "The browser does not let this page copy; select the text instead.";
      return;
    }
  }
  const { textContent } = button;
  button.textContent = at("look").textContent = "Copied";
  button.disabled = true;
  setTimeout(() => {
    button.textContent = textContent;
    button.disabled = false;
  }, COPIED_MS);
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
  turns = [];
  at("talk").textContent = "";
  keep();
  at("message").focus();
});
at("markdown").addEventListener("change", () => {
  for (const article of at("talk").children) article.redraw?.();
});
at("settings").addEventListener("input", keep);
window.addEventListener("beforeunload", () => running?.abort()); // or it would end as an error
window.addEventListener("pagehide", keep);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
for (const name of ["pointerover", "focusin"]) {
  at("talk").addEventListener(name, (event) => {
    if (event.target.token) look(event.target);
  });
}
at("talk").addEventListener("click", (event) => {
  if (event.target.copied) copy(event.target);
});
at("talk").addEventListener("keydown", (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step || !event.target.token) return;
  const words = [...event.target.closest(".text").getElementsByClassName("t")];
  const next = words[words.indexOf(event.target) + step];
  if (!next) return;
  event.preventDefault();
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
});
restore();
