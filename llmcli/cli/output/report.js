"use strict";
// Opens the panel for a token. Everything the model wrote reaches the page as text nodes only.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const panel = document.getElementById("panel");
  const find = (name) => panel.querySelector(`.${name}`);
  const hint = find("hint");
  const view = find("view");
  const stories = [...document.querySelectorAll(".story[data-sample]")];
  const isOnlySample = stories.length === 1;

  // For each sample the element of each token; one that wrote only a part of a character belongs to its end.
  const elements = stories.map((story) => {
    const result = [];
    for (const element of story.querySelectorAll(".t")) {
      const last = Number(element.dataset.n);
      while (result.length < last) result.push(element);
      element.removeAttribute("title"); // the panel says it
    }
    return result;
  });

  let pinned = null; // the token that stays when the mouse leaves the text: {sample, index}
  let shown = null;

  const isSame = (a, b) => a !== null && b !== null && a.sample === b.sample && a.index === b.index;
  const elementOf = ({ sample, index }) => elements[sample][index];
  const addressOf = ({ sample, index }) => `#${isOnlySample ? "" : `sample-${data.samples[sample].number}-`}token-${index + 1}`;

  function placeOf(element) {
    const story = element.closest(".story[data-sample]");
    return { sample: stories.indexOf(story), index: Number(element.dataset.n) - 1 };
  }

  function placeFromAddress() {
    const match = /^#(?:sample-(\d+)-)?token-(\d+)$/.exec(location.hash);
    if (!match) return null;
    const sample = match[1] ? data.samples.findIndex(({ number }) => number === Number(match[1])) : 0;
    const index = Number(match[2]) - 1;
    return sample >= 0 && data.samples[sample].tokens[index] ? { sample, index } : null;
  }

  /** An element with a class, and strings or elements as its content. */
  function make(tag, name, ...content) {
    const element = document.createElement(tag);
    if (name) element.className = name;
    element.append(...content);
    return element;
  }

  /** A token as it is shown, its spaces and line breaks paler than its letters. */
  function piece(id) {
    const parts = data.pieces[id].split(/([·⏎⇥]+)/).filter(Boolean);
    return make("bdi", "", ...parts.map((part) => (/^[·⏎⇥]/.test(part) ? make("span", "space", part) : part)));
  }

  function percent(probability) {
    if (probability === 0 || probability === 1) return `${probability * 100}%`;
    if (probability < 0.00001) return "<0.001%";
    if (probability < 0.001) return `${(probability * 100).toFixed(3)}%`;
    if (probability < 0.1) return `${(probability * 100).toFixed(2)}%`;
    return probability >= 0.9995 ? ">99.9%" : `${(probability * 100).toFixed(1)}%`;
  }

  const count = (number) => number.toLocaleString("en");
  const level = (probability) => data.levels.filter((limit) => probability < limit).length;

  function rank(token) {
    const index = token.alternatives.findIndex(([id]) => id === token.id);
    return index >= 0 ? `no. ${index + 1}` : `after no. ${token.alternatives.length}`;
  }

  function alternativeRow(label, probability, name, tag) {
    const fill = make("span", "fill");
    fill.style.width = `${probability * 100}%`;
    const track = make("span", "track", fill, ...(tag ? [make("span", "tag", tag)] : []));
    return make("li", name, make("span", "label", label), track, make("span", "amount", percent(probability)));
  }

  function alternatives(token) {
    // The steps list only the likeliest of what they removed, so an unmarked token may be gone too, unless all others are.
    const removedBy = new Map(token.steps.flatMap(([step, , , , removed]) => removed.map(([id]) => [id, data.steps[step].name])));
    const isOnlyOneLeft = token.steps.at(-1)?.[2] === 1;
    const listed = [...token.alternatives];
    if (!listed.some(([id]) => id === token.id)) listed.push([token.id, token.p]);
    const rows = listed.map(([id, probability]) => {
      const name = id === token.id ? "is-chosen" : removedBy.has(id) || isOnlyOneLeft ? "is-removed" : "";
      return alternativeRow(piece(id), probability, name, removedBy.get(id));
    });
    const rest = 1 - listed.reduce((sum, [, probability]) => sum + probability, 0);
    if (rest > 0.0005) rows.push(alternativeRow("all others", rest, "is-rest"));
    return rows;
  }

  /** A list of tokens with their probabilities, as in a sentence. */
  function mentions(tokens) {
    return tokens.flatMap(([id, probability], index) => [
      index ? ", " : "",
      make("span", "mention", piece(id), ` ${percent(probability)}`),
    ]);
  }

  function funnel(token) {
    // Logarithmic, so that the step from 100 to 10 looks like the one from 10 to 1.
    const width = (left) => 8 + (92 * Math.log(left)) / Math.log(Math.max(token.of, 2));
    const rows = [];
    let before = token.of;
    const add = (left, name, amount, details, isCut) => {
      const shape = make("span", `shape ${isCut ? "cut" : "kept"}`);
      const [top, bottom] = [50 - width(before) / 2, 50 - width(left) / 2];
      shape.style.clipPath = `polygon(${top}% 0, ${100 - top}% 0, ${100 - bottom}% 100%, ${bottom}% 100%)`;
      const headline = make("div", "headline", make("span", "name", name), make("span", "left", amount));
      const lines = details.filter((detail) => detail.length).map((detail) => make("div", "detail", ...detail));
      rows.push(make("li", "", shape, make("div", "step", headline, ...lines)));
      before = left;
    };
    add(token.of, "the model", `${count(token.of)} tokens`, [["this token ", percent(token.p)]], false);
    for (const [step, removed, left, chance, examples] of token.steps) {
      const { name, value } = data.steps[step];
      const what = removed ? [`removed ${count(removed)}: `, ...mentions(examples.slice(0, 3))] : [];
      const amount = removed ? `${count(left)} left` : "";
      add(left, value === null ? name : `${name} ${value}`, amount, [["this token ", percent(chance)], what], removed > 0);
    }
    const [likeliest, probability] = token.likeliest;
    const passedOver = likeliest === token.id ? [] : ["passed over ", ...mentions([[likeliest, probability]])];
    add(before, data.is_greedy ? "the likeliest" : "the draw", "", [[piece(token.id)], passedOver], false);
    return rows;
  }

  function show(place) {
    if (isSame(place, shown)) return;
    if (shown) elementOf(shown).classList.remove("shown");
    shown = place;
    hint.hidden = place !== null;
    view.hidden = place === null;
    document.documentElement.classList.toggle("is-open", place !== null);
    if (!place) return;
    const { tokens, number } = data.samples[place.sample];
    const token = tokens[place.index];
    elementOf(place).classList.add("shown");
    const sample = isOnlySample ? "" : `sample ${number}, `;
    find("position").textContent = `${sample}token ${place.index + 1} of ${tokens.length}`;
    const big = piece(token.id);
    big.className = `l${level(token.p)}`;
    find("piece").replaceChildren(big);
    find("by-model").textContent = percent(token.p);
    find("drawn-label").textContent = data.is_greedy ? "after the steps" : "when drawn";
    find("when-drawn").textContent = percent(token.drawn);
    find("rank").textContent = rank(token);
    find("alternatives").replaceChildren(...alternatives(token));
    find("funnel").replaceChildren(...funnel(token));
    find("previous").disabled = place.index === 0;
    find("next").disabled = place.index === tokens.length - 1;
    panel.scrollTop = 0;
  }

  /** Show a token and stay there: it is the one that the tab key comes back to, and the address names it. */
  function pin(place, { focuses = false } = {}) {
    if (pinned) elementOf(pinned).removeAttribute("aria-describedby");
    pinned = place;
    show(place);
    history.replaceState(null, "", addressOf(place));
    const element = elementOf(place);
    for (const other of stories[place.sample].querySelectorAll("[tabindex='0']")) other.tabIndex = -1;
    element.tabIndex = 0;
    if (focuses) element.focus({ preventScroll: true });
    element.scrollIntoView({ block: "nearest" });
  }

  function close() {
    pinned = null;
    show(null);
    history.replaceState(null, "", location.pathname + location.search);
  }

  function move(place, distance, focuses) {
    const last = data.samples[place.sample].tokens.length - 1;
    pin({ sample: place.sample, index: Math.min(Math.max(place.index + distance, 0), last) }, { focuses });
  }

  for (const story of stories) {
    story.addEventListener("pointerover", (event) => {
      const element = event.target.closest(".t");
      if (element && event.pointerType === "mouse") show(placeOf(element));
    });
    story.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse" && pinned) show(pinned);
    });
    story.addEventListener("click", (event) => {
      const element = event.target.closest(".t");
      if (element && getSelection().isCollapsed) pin(placeOf(element), { focuses: true });
    });
    story.addEventListener("focusin", (event) => {
      const element = event.target.closest(".t");
      // A token that wrote only a part of a character has the focus through its end.
      if (element && !(pinned && elementOf(pinned) === element)) pin(placeOf(element));
    });
    story.addEventListener("keydown", (event) => {
      const distances = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
      const distance = distances[event.key];
      if (distance === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      move(pinned ?? placeOf(event.target), distance, true);
    });
    const first = story.querySelector(".t");
    if (first) first.tabIndex = 0; // one stop of the tab key for each text, the arrow keys for its tokens
  }

  stories.forEach((story, sample) => {
    const skyline = story.parentElement.querySelector(".skyline");
    if (!skyline) return; // a sample that was interrupted before its first token
    const placeAt = (event) => {
      const box = skyline.getBoundingClientRect();
      const { length } = data.samples[sample].tokens;
      return { sample, index: Math.min(Math.max(Math.floor(((event.clientX - box.left) / box.width) * length), 0), length - 1) };
    };
    skyline.addEventListener("pointermove", (event) => event.pointerType === "mouse" && show(placeAt(event)));
    skyline.addEventListener("pointerleave", () => pinned && show(pinned));
    skyline.addEventListener("click", (event) => pin(placeAt(event)));
  });

  find("previous").addEventListener("click", () => move(shown, -1, false));
  find("next").addEventListener("click", () => move(shown, 1, false));
  find("close").addEventListener("click", close);
  addEventListener("keydown", (event) => event.key === "Escape" && close());
  const openAddress = () => {
    const place = placeFromAddress();
    if (place) pin(place, { focuses: true });
  };
  addEventListener("hashchange", openAddress);

  document.documentElement.classList.add("interactive");
  panel.hidden = false;
  openAddress();
})();
