// The panel of a page of `generate`: what the model expected, and what the sampler left of it.
(() => {
  const { data, find, make, piece, percent, count, bar } = kit;

  function rank(token) {
    const index = token.alternatives.findIndex(([id]) => id === token.id);
    return index >= 0 ? `no. ${index + 1}` : `after no. ${token.alternatives.length}`;
  }

  function alternatives(place, token) {
    // The steps list only the likeliest of what they removed, so an unmarked token may be gone too, unless all others are.
    const removedBy = new Map(token.steps.flatMap(([step, , , , removed]) => removed.map(([id]) => [id, data.steps[step].name])));
    const isOnlyOneLeft = token.steps.at(-1)?.[2] === 1;
    const listed = [...token.alternatives];
    if (!listed.some(([id]) => id === token.id)) listed.push([token.id, token.p]);
    const rows = listed.map(([id, probability]) => {
      const name = id === token.id ? "is-chosen" : removedBy.has(id) || isOnlyOneLeft ? "is-removed" : "";
      return bar(roads.label(place, id), probability, name, removedBy.get(id));
    });
    const rest = 1 - listed.reduce((sum, [, probability]) => sum + probability, 0);
    if (rest > 0.0005) rows.push(bar("all others", rest, "is-rest"));
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

  function fill(place, token) {
    find("by-model").textContent = percent(token.p);
    find("drawn-label").textContent = data.is_greedy ? "after the steps" : "when drawn";
    find("when-drawn").textContent = percent(token.drawn);
    find("rank").textContent = rank(token);
    find("alternatives").replaceChildren(...alternatives(place, token));
    find("funnel").replaceChildren(...funnel(token));
    roads.note(place);
  }

  kit.open({ fill, leave: roads.leave });
})();
