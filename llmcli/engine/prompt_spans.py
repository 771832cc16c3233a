"""Which prompts run together in one step.

Prompts of several texts share the passes over the weights, so they run in one step as far as rows can wait for it.
"""

from collections.abc import Callable, Sequence
from typing import TypeGuard

from llmcli.engine.fill import MOST_FILL_TOKENS, Fill, FillBudget
from llmcli.engine.step_masks import StepMasks
from llmcli.engine.texts import Score, Shared, Text
from llmcli.runners.base import PAGE_TOKENS, Runner, Span

AnyFill = Fill[Text | Score | Shared]
FillSpan = tuple[AnyFill, Span]

_SCORED_TOKENS = 256  # tokens scored at a time if no row waits; their logits are in memory together
# A shorter span counts as so many tokens: cards multiply a short prompt apart from long ones.
_LEAST_TOKENS = 64


def prompt_spans(
    runner: Runner,
    budget: FillBudget,
    fills: Sequence[AnyFill],
    start_next: Callable[[Sequence[AnyFill]], AnyFill | None],
    *,
    is_alone: bool,
) -> list[FillSpan]:
    """The fills that run next, in one step, and the span of each. Only the last one may go on behind its span.

    They come from `fills`, then from `start_next`, which is given those that run beside it and adds to `fills`. If no
    row runs, or if prompts share nothing on this runner, it is one fill.
    """
    joins = runner.limits.joins_prompts and not is_alone
    room = MOST_FILL_TOKENS if is_alone else budget.num_tokens
    together: list[FillSpan] = []
    while room >= _LEAST_TOKENS:
        fill = fills[len(together)] if len(together) < len(fills) else start_next([fill for fill, _ in together])
        if fill is None:
            break
        owner = fill.owner
        masks = StepMasks().of(owner.sample) if isinstance(owner, Text) else None
        most = room if not isinstance(owner, Score) else _SCORED_TOKENS if is_alone else _LEAST_TOKENS
        span = fill.next_span(runner, most, masks)
        if together and num_tokens([(fill, span)]) > room:
            break
        together.append((fill, span))
        room -= num_tokens([(fill, span)])
        if not (joins and fill.ends_with(span) and _shares_steps(owner)):
            break
    return together


def num_tokens(spans: Sequence[FillSpan]) -> int:
    """Tokens of all spans, as they count for a step's time."""
    return sum(max(len(span.token_ids), _LEAST_TOKENS) for _, span in spans)


def may_join(first: Text | Score, beside: Sequence[AnyFill]) -> bool:
    """Whether what waits may start beside fills of the same step.

    A prompt waits if it would find a page which these compute next. Only that page's tokens are compared, not those
    before it.
    """
    return _shares_steps(first) and not any(
        len(fill.next_page) == PAGE_TOKENS
        and first.sample.request.prompt_token_ids[fill.num_run : fill.num_run + PAGE_TOKENS] == tuple(fill.next_page)
        for fill in beside
    )


def _shares_steps(owner: Text | Score | Shared) -> TypeGuard[Text]:
    """Whether nobody reads its logits behind the step: another pass may have overwritten them."""
    if not isinstance(owner, Text) or owner.sample.request.must_read_choices:
        return False
    return owner.shared is None or len(owner.sample.token_ids) > 0
