"""What a step runs and chooses for a text: its span with drafts, and then the tokens chosen."""

import time
from collections.abc import Sequence
from itertools import takewhile

from llmcli.engine.drafts import MAX_DRAFT_ROWS, Drafting, TextDrafts
from llmcli.engine.events import Event, Failed, Token
from llmcli.engine.held_guesses import HeldGuesses
from llmcli.engine.step_masks import StepMasks
from llmcli.engine.texts import Queued, Text
from llmcli.errors import LLMCliError
from llmcli.runners.base import Chosen, Logits, Runner, Span


def next_spans(runner: Runner, texts: Sequence[Text], drafting: Drafting | None) -> list[Span]:
    """The spans that choose the next token of each text, in one step."""
    masks = StepMasks()
    drafting = drafting if len(texts) <= MAX_DRAFT_ROWS else None
    return [_next_span(runner, text, drafting, len(texts), masks) for text in texts]


def _next_span(runner: Runner, text: Text, drafting: Drafting | None, num_rows: int, masks: StepMasks) -> Span:
    assert text.row is not None
    sample = text.sample
    logits: Logits | None = None
    drafts: tuple[int, ...] = ()
    is_read = 0 < text.num_queued <= len(sample.token_ids)
    if text.num_queued == 0 and text.shared is not None:
        logits = text.shared.logits
    elif is_read and drafting is not None:
        drafts = sample.fitting(_drafts(runner, text, text.row, drafting, num_rows))
    if sample.held_text is None:
        return Span(text.row, (), "last", logits, drafts)
    return Span(text.row, (), "last", logits, drafts, masks.of(sample, text.read_ahead, drafts))


def wait_for_choices(runner: Runner, texts: Sequence[Text], drafting: Drafting | None) -> bool:
    """Whether queued steps are read before the next is queued, as drafts may follow what they choose.

    So it is once a text repeats itself. All texts wait for it: else it would have a place in every second step only.
    """
    if drafting is None:
        return False
    if len(texts) > MAX_DRAFT_ROWS:
        return any(one.has_unread_drafts for one in texts)
    waiting = [one.has_unread_drafts or _repeats_itself(runner, one, drafting, len(texts)) for one in texts]
    return any(waiting)


def _repeats_itself(runner: Runner, text: Text, drafting: Drafting, num_rows: int) -> bool:
    """Whether drafts would follow the text's tokens, though the next of them is chosen already and not read."""
    sample = text.sample
    if len(sample.token_ids) >= text.num_queued:
        return False
    drafts = _text_drafts(text, drafting)  # before the first token: the prompt is looked through while it runs
    most = min(runner.limits.max_drafts, sample.max_tokens - text.num_queued - 1)
    return (
        drafts is not None
        and len(sample.token_ids) > 0
        and drafting.are_worth_waiting(drafts, sample.token_ids, most, num_rows)
    )


def _drafts(runner: Runner, text: Text, row: int, drafting: Drafting, num_rows: int) -> tuple[int, ...]:
    """Guesses of what the text says next, if they are of use. They take no page from another text."""
    sample = text.sample
    most = min(runner.limits.max_drafts, sample.max_tokens - len(sample.token_ids) - 1)
    if most < 1:
        return ()
    text_drafts = _text_drafts(text, drafting)
    if text_drafts is None:
        return ()
    drafts = drafting.drafts(text_drafts, sample.token_ids, most, num_rows)
    drafts = tuple(takewhile(lambda token_id: token_id < runner.config.vocab_size, drafts))
    return drafts if runner.reserve(row, runner.num_tokens(row) + 1 + len(drafts)) else ()


def _text_drafts(text: Text, drafting: Drafting) -> TextDrafts | None:
    if text.drafts is None:
        held_text, sampler = text.sample.held_text, text.sample.sampler
        prompt = text.sample.request.prompt_token_ids
        if held_text is None:
            text.drafts = drafting.begin(prompt, sampler)
        else:
            text.drafts = drafting.begin(prompt, sampler, lambda guesses: HeldGuesses(guesses, held_text))
    return text.drafts


def take_choices(runner: Runner, text: Text, chosen: Chosen, queued: Queued, place: int) -> list[Event]:
    """Give a text what a step has chosen; its `finish_reason` says whether it is over.

    What a draft has chosen behind the text's end is taken out of the row: it holds what it would hold without drafts.
    """
    sample = text.sample
    text.has_unread_drafts = False
    text.unread.popleft()
    if isinstance(chosen, LLMCliError):
        return [Failed(sample.index, chosen, sample.number)]
    if not sample.token_ids and not sample.prefill_seconds:
        sample.prefill_seconds = time.perf_counter() - sample.start_time
    logits = None
    if sample.request.num_alternatives is not None:
        logits = queued.step.logits(place, queued.last_tokens[place])
    text.num_queued += len(chosen) - 1
    events: list[Event] = []
    for number, (token_id, _, mirostat_mu) in enumerate(chosen):
        inspect = None if logits is None else sample.inspection(logits[number])
        inspection = inspect(token_id) if inspect else None
        new_text = sample.push(token_id, mirostat_mu)
        events.append(Token(sample.index, token_id, new_text, inspection, sample.number))
        if sample.finish_reason is not None:
            if number + 1 < len(chosen) and text.row is not None:
                runner.keep(text.row, len(sample.request.prompt_token_ids) + len(sample.token_ids) - 1)
            break
    return events


def learn_drafts(drafting: Drafting, queued: Queued, chosen: list[Chosen]) -> None:
    """Tell how long a step took that has just been read, and how many drafts it has kept.

    A step that was queued ahead began when the one before it was read, or a little earlier.
    """
    now = time.perf_counter()
    if queued.start_time is not None:
        num_kept = sum(len(one) - 1 for one in chosen if isinstance(one, tuple))
        drafting.learn(len(chosen), queued.num_drafts, num_kept, now - max(queued.start_time, drafting.read_time))
    drafting.read_time = now
