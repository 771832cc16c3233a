"""Runs the same tokens through a model on two runners: how far apart layers and logits are, and may be."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmcli.runners.base import HiddenStates, Runner, Span

FloatArray = npt.NDArray[np.float32]

# The inputs of four products and of attention, keys and values are each rounded once to 16 bits; float16 has 11 bits of
# precision. Rounding errors are independent: their sum grows with the root of their number.
_ROUNDINGS_PER_LAYER = 7
_ROUNDOFF = 2.0**-11
_GROWTH = 2.0  # of an error in later layers, at most
_HIDDEN = 2.0**-14  # of a hidden state; times the bound it is 16 of its roundings to float32
_LARGEST = 6.0  # standard deviations: the largest of ten million normal numbers lies within


@dataclass(frozen=True)
class LayerVerdict:
    """What one layer adds to the hidden states of a text, on two runners with the same input.

    `module` is the layer's name, such as `layers.0`; `embed_tokens` comes before the first. `largest` is the largest
    error of an element relative to its scale, and `bound` its limit. The scale is the size of what the layer adds: to
    the element, or the root mean square of the token's elements if that is larger. The worst element is number
    `element` of the token at `position`: its hidden state is `actual`, and `expected` on the reference.
    """

    module: str
    largest: float
    bound: float
    position: int
    element: int
    actual: float
    expected: float

    @property
    def part_of_bound(self) -> float:
        """The largest error relative to its bound."""
        return self.largest / self.bound

    @property
    def is_right(self) -> bool:
        """Whether roundings can explain every difference; NaN is not right."""
        return self.part_of_bound <= 1


@dataclass(frozen=True)
class LogitsVerdict:
    """Logits of a text on two runners.

    `largest` is the largest difference and `spread` the standard deviation of that position's logits; `bound` limits
    their ratio. The first `num_prompt_tokens` ran together, the others one by one.
    """

    num_tokens: int
    num_prompt_tokens: int
    largest: float
    spread: float
    bound: float
    position: int
    token_id: int
    num_same_choices: int

    @property
    def part_of_bound(self) -> float:
        """The largest difference relative to its bound."""
        return self.largest / (self.spread * self.bound)

    @property
    def is_right(self) -> bool:
        """Whether roundings can explain every difference; NaN is not right."""
        return self.part_of_bound <= 1


def compare_layers(runner: Runner, reference: Runner, token_ids: Sequence[int]) -> list[LayerVerdict]:
    """Run the tokens as `compare_logits` does, layer by layer; compare what each layer adds, the embedding first.

    Every layer of `reference` gets its input from `runner`. So a wrong layer spoils no other, and each has only its own
    roundings.
    Raises: as `compare_logits`
    """
    found = _hidden_states(runner, token_ids)
    expected = _hidden_states(reference, token_ids, found)
    embedding = _compare_layer("embed_tokens", _ROUNDOFF, np.zeros_like(found[0]), found[0], expected[0])
    layers = enumerate(zip(found[:-1], found[1:], expected[1:], strict=True))
    return [embedding, *(_compare_layer(f"layers.{index}", _bound(1), *states) for index, states in layers)]


def _compare_layer(
    module: str, bound: float, before: FloatArray, found: FloatArray, expected: FloatArray
) -> LayerVerdict:
    """The verdict on one layer. Shapes: before, found, expected [num_tokens, hidden_size]"""
    actual, wanted = found.astype(np.float64), expected.astype(np.float64)
    added = np.abs(wanted - before)
    difference = np.abs(actual - wanted)
    # If a large hidden state hides what is added to it, the sum's own rounding to float32 counts.
    scale = np.maximum(added, np.sqrt(np.square(added).mean(axis=1, keepdims=True))) + _HIDDEN * np.abs(wanted)
    wrong = np.where(difference == 0, 0.0, np.inf)  # if nothing is added, or NaN
    with np.errstate(invalid="ignore"):  # infinity is wrong, whatever its scale
        ratio = np.divide(difference, scale, out=wrong, where=scale > 0)
    place = position, element = np.unravel_index(np.argmax(ratio), ratio.shape)  # NaN counts as the largest
    return LayerVerdict(
        module=module,
        largest=float(ratio[place]),
        bound=bound,
        position=int(position),
        element=int(element),
        actual=float(actual[place]),
        expected=float(wanted[place]),
    )


def compare_logits(runner: Runner, reference: Runner, token_ids: Sequence[int]) -> LogitsVerdict:
    """Run the first half of the tokens as a prompt and the others one by one, on both; compare all logits.

    Raises: ValueError for fewer than two tokens; DeviceError
    """
    found, expected = (_logits(one, token_ids) for one in (runner, reference))
    spread = expected.std(axis=1, dtype=np.float64)
    difference = np.abs(found.astype(np.float64) - expected)
    ratio = difference / spread[:, None]
    position, token_id = map(int, np.unravel_index(np.argmax(ratio), ratio.shape))  # NaN counts as the largest
    return LogitsVerdict(
        num_tokens=len(token_ids),
        num_prompt_tokens=_num_prompt_tokens(token_ids),
        largest=float(difference[position, token_id]),
        spread=float(spread[position]),
        bound=_bound(runner.config.num_hidden_layers),
        position=position,
        token_id=token_id,
        num_same_choices=int((found.argmax(axis=1) == expected.argmax(axis=1)).sum()),
    )


def _bound(num_layers: int) -> float:
    """How far a number after `num_layers` layers may be off, relative to the standard deviation of all."""
    return _LARGEST * _GROWTH * _ROUNDOFF * math.sqrt(_ROUNDINGS_PER_LAYER * num_layers)


def _num_prompt_tokens(token_ids: Sequence[int]) -> int:
    if len(token_ids) < 2:
        raise ValueError(f"{len(token_ids)} tokens, needed are 2: one for a prompt, and one alone")
    return len(token_ids) // 2


def _logits(runner: Runner, token_ids: Sequence[int]) -> FloatArray:
    """The logits after every token. Shapes: result [num_tokens, vocab_size]"""
    return np.concatenate(_run(runner, token_ids, lambda span: runner.queue([span]).logits(0)))


def _hidden_states(runner: Runner, token_ids: Sequence[int], inputs: HiddenStates | None = None) -> HiddenStates:
    """The outputs of all layers. Shapes: inputs, result [num_hidden_layers + 1, num_tokens, hidden_size]"""

    def look(span: Span) -> HiddenStates:
        begin = runner.num_tokens(span.row)
        given = None if inputs is None else inputs[:, begin : begin + len(span.token_ids)]
        return runner.hidden_states(span, given)

    return np.concatenate(_run(runner, token_ids, look), axis=1)


def _run(runner: Runner, token_ids: Sequence[int], look: Callable[[Span], FloatArray]) -> list[FloatArray]:
    """Run the first half of the tokens as a prompt and the others one by one; `look` runs a span."""
    num_prompt_tokens = _num_prompt_tokens(token_ids)
    prompt, others = tuple(token_ids[:num_prompt_tokens]), token_ids[num_prompt_tokens:]
    row = runner.open(prompt)
    try:
        runner.keep(row, 0)
        parts = []
        while (begin := runner.num_tokens(row)) < num_prompt_tokens:
            end = runner.span_end(row, num_prompt_tokens)
            parts.append(look(Span(row, prompt[begin:end], "none")))
        return parts + [look(Span(row, (token_id,), "none")) for token_id in others]
    finally:
        runner.close(row)
