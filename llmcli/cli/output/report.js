"use strict";
// What all pages share: the tokens of the text, and the panel of the one that is looked at. Everything that a model wrote
// reaches the page as text nodes only. A page's own script calls kit.open with what fills its panel.
const kit = (() => {
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

  let fill = () => {}; // the page's own: fills the panel for (place, token)
  let leave = () => false; // the page's own: closes what stands open in the text beside a place; whether anything did
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

  /** A row of a list of probabilities: a label, a bar, and the figure. */
  function bar(label, probability, name, tag) {
    const fill = make("span", "fill");
    fill.style.width = `${probability * 100}%`;
    const track = make("span", "track", fill, ...(tag ? [make("span", "tag", tag)] : []));
    return make("li", name, make("span", "label", label), track, make("span", "amount", percent(probability)));
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
    fill(place, token);
    find("previous").disabled = place.index === 0;
    find("next").disabled = place.index === tokens.length - 1;
    panel.scrollTop = 0;
  }

  /** Show a token and stay there: it is the one that the tab key comes back to, and the address names it. */
  function pin(place, { focuses = false } = {}) {
    if (pinned) elementOf(pinned).removeAttribute("aria-describedby");
    leave(place);
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
  addEventListener("keydown", (event) => event.key === "Escape" && (leave(null) || close()));
  const openAddress = () => {
    const place = placeFromAddress();
    if (place) pin(place, { focuses: true });
  };
  addEventListener("hashchange", openAddress);

  function open(page) {
    fill = page.fill;
    leave = page.leave ?? leave;
    document.documentElement.classList.add("interactive");
    panel.hidden = false;
    openAddress();
  }

  return { data, stories, find, make, piece, percent, count, level, bar, isSame, elementOf, placeOf, pin, open };
})();
