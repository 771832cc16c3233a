// Roads: what the text would have said behind a token that was not drawn, shown in the text's own place.
const roads = (() => {
  const { data, stories, find, make, piece, percent, level, isSame, elementOf, placeOf, pin } = kit;

  let taken = null; // the road that is shown: {sample, index, road, parts}, parts being its elements in the text

  const roadsAt = ({ sample, index }) => data.samples[sample].roads.filter(({ place }) => place === index);

  /** A road's word; the white space around it stays outside the tint, as in the text. */
  function word([text, probability, isUnseen], isFirst) {
    const [, begin, ink, end] = /^(\s*)([^]*?)(\s*)$/.exec(text);
    const name = isUnseen ? "unseen" : isFirst ? "turn" : `l${level(probability)}`;
    return ink ? [begin, make("span", name, ink), end] : [text];
  }

  /** Split the white space that the token itself wrote from what stands before it; a road writes its own. */
  function splitBefore(element, id) {
    const before = element.previousSibling;
    if (before?.nodeType !== Node.TEXT_NODE) return element;
    const [written] = /^[·⏎⇥]*/.exec(data.pieces[id]);
    const [blank] = /\s*$/.exec(before.data);
    const length = written === data.pieces[id] ? 0 : Math.min(written.length, blank.length);
    return length ? before.splitText(before.data.length - length) : element;
  }

  function setPressed() {
    for (const button of document.querySelectorAll("[aria-pressed]")) button.setAttribute("aria-pressed", String(isTaken(button.road)));
  }

  const isTaken = (road) => taken !== null && taken.road === road;

  /** Say in the panel which road is shown. */
  function note(place) {
    if (isSame(taken, place)) find("position").append(", the road of ", piece(taken.road.id));
  }

  /** Leave the road, unless it begins at `place`; whether there was one to leave. */
  function leave(place) {
    if (!taken || isSame(taken, place)) return false;
    const story = stories[taken.sample];
    for (const part of taken.parts) part.remove();
    for (const element of story.querySelectorAll(".passed")) element.classList.remove("passed");
    story.normalize();
    taken = null;
    setPressed();
    return true;
  }

  /** Show a road from its fork on; what was drawn there stands below it, paler. */
  function take(sample, road) {
    leave(null);
    const place = { sample, index: road.place };
    pin(place);
    const element = elementOf(place);
    const words = road.words.flatMap((each, index) => word(each, index === 0));
    const line = make("span", "road", ...words, ...(road.end ? [" ", make("span", "road-end", road.end)] : []));
    const label = make("span", "instead", "what was drawn instead");
    splitBefore(element, data.samples[sample].tokens[road.place].id).before(line, label);
    for (const other of stories[sample].querySelectorAll(".t")) {
      other.classList.toggle("passed", Number(other.dataset.n) > road.place);
    }
    taken = { ...place, road, parts: [line, label] };
    setPressed();
    note(place);
    line.scrollIntoView({ block: "nearest" });
  }

  const toggle = (sample, road) => (isTaken(road) ? leave(null) : take(sample, road));

  function button(content, name, sample, road) {
    const element = make("button", name, ...content);
    element.type = "button";
    wire(element, sample, road);
    return element;
  }

  function wire(element, sample, road) {
    element.road = road;
    element.setAttribute("aria-pressed", String(isTaken(road)));
    element.addEventListener("click", () => toggle(sample, road));
  }

  /** A rejected token of a list; one that has a road is a button. */
  function label(place, id) {
    const road = roadsAt(place).find((each) => each.id === id);
    if (!road) return piece(id);
    const element = button([piece(id)], "take", place.sample, road);
    element.title = `${percent(road.chance)} when drawn: read where it would have led`;
    return element;
  }

  stories.forEach((story, sample) => {
    const links = story.parentElement.querySelectorAll(".road-link");
    for (const link of links) wire(link, sample, data.samples[sample].roads[Number(link.dataset.road)]);
    story.addEventListener("keydown", (event) => {
      const element = event.target.closest(".t");
      if (event.key !== "Enter" || !element) return;
      // One Enter after the other: the token's roads in turn, and back to the text.
      const here = roadsAt(placeOf(element));
      const next = here[here.findIndex(isTaken) + 1];
      if (next) take(sample, next);
      else leave(null);
    });
  });

  return { label, leave, note };
})();
