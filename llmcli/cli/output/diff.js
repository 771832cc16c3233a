// The panel of a page of `diff`: what both models give a token of A's text, and what else they expected.
(() => {
  const { find, make, piece, percent, bar } = kit;

  function row(label, letter, probability, isChosen) {
    const element = bar(label, probability, `of-${letter}${isChosen ? " is-chosen" : ""}`, isChosen ? `${letter}’s choice` : "");
    element.lastChild.prepend(make("span", "letter", letter), " ");
    return element;
  }

  function fill(place, token) {
    find("by-first").textContent = percent(token.first);
    find("by-second").textContent = percent(token.p);
    find("kl").textContent = token.kl < 0.00005 ? "0" : String(Number(token.kl.toPrecision(2)));
    const [first, second] = [piece(token.id), piece(token.choice)];
    const isAgreed = token.id === token.choice;
    find("choices").replaceChildren(...(isAgreed ? ["Both choose ", first, "."] : ["A chose ", first, ", B would choose ", second, "."]));
    const rows = token.alternatives.flatMap(([id, a, b]) => [
      row(piece(id), "A", a, id === token.id),
      row("", "B", b, id === token.choice),
    ]);
    find("alternatives").replaceChildren(...rows);
  }

  kit.open({ fill });
})();
