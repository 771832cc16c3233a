"""A device without a model: pages hold token ids, and a row's next token is a function of its pages' content.

So a page that is wrongly shared, released too soon or not copied changes the text. `next_token` may raise
KeyboardInterrupt: then nothing has been chosen.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from llmcli.errors import LLMCliError
from llmcli.runners.base import MAX_SPAN, PAGE_TOKENS, AllLogits, Arithmetic, Chosen, Limits
from llmcli.runners.step_device import SINGLE, Work
from llmcli.sampling.chain import Choice
from llmcli.sampling.params import Sampler

VOCAB_SIZE = 258
NextToken = Callable[[Sequence[int], Sampler], int]


class PageDevice:
    """A `StepDevice`. `chunk` is where prompts may be cut; with `works_ahead` a step's choices come late.

    `seconds` is the time that a span seems to take, by its position and number of tokens.
    """

    description = "pages"
    cache_type = "tokens"
    arithmetic = Arithmetic("tokens", "auto", None, ())

    def __init__(
        self,
        next_token: NextToken,
        *,
        num_rows: int = 1,
        max_seq_len: int = 1000,
        num_pages: int | None = None,
        chunk: int = 64,
        works_ahead: bool = False,
        seconds: Callable[[int, int], float] = lambda position, num_tokens: 1e-5 * num_tokens,
        max_drafts: int = MAX_SPAN - 1,
        joins_prompts: bool = False,
    ):
        pages = -(-max_seq_len // PAGE_TOKENS) * num_rows if num_pages is None else num_pages
        self.config: Any = SimpleNamespace(vocab_size=VOCAB_SIZE)
        self.limits = Limits(num_rows, max_seq_len, pages, works_ahead, max_drafts, joins_prompts=joins_prompts)
        self.next_token = next_token
        self.chunk = chunk
        self.seconds = seconds
        self.pages: list[list[int | None]] = [[None] * PAGE_TOKENS for _ in range(pages)]
        self.samplers: dict[int, Sampler] = {}
        self.chosen: dict[int, int] = {}
        self.works: list[list[Work]] = []

    def method(self, position: int, prompt_len: int) -> int:
        begin = self.cut(position, prompt_len)
        num_tokens = min(begin + self.chunk, prompt_len) - begin
        return SINGLE if num_tokens <= MAX_SPAN else num_tokens

    def cut(self, position: int, prompt_len: int) -> int:
        return position // self.chunk * self.chunk

    def span_end(self, position: int, most: int, prompt_len: int) -> int:
        return min((position // self.chunk + 1) * self.chunk, prompt_len)

    def copy_page(self, source: int, target: int) -> None:
        self.pages[target] = list(self.pages[source])

    def set_slot(self, slot: int, sampler: Sampler, token_ids: Sequence[int]) -> None:
        self.samplers[slot] = sampler

    def set_sampler(self, slot: int, sampler: Sampler) -> None:
        self.samplers[slot] = sampler

    def run(self, works: Sequence[Work]) -> "PageStep":
        self.works.append(list(works))
        chosen = [self._run(work) for work in works]
        for work, choices in zip(works, chosen, strict=True):
            if work.slot is not None and isinstance(choices, tuple) and choices:
                self.chosen[work.slot] = choices[-1].token_id
        seconds = sum(self.seconds(work.position, work.num_tokens) for work in works if work.token_ids)
        return PageStep(chosen, seconds, [work.num_tokens for work in works])

    def _run(self, work: Work) -> Chosen:
        token_ids = work.token_ids
        if not token_ids and work.num_tokens and work.slot is not None:
            # 0: the choice has failed, which the host may not know yet
            token_ids = (self.chosen.get(work.slot, 0), *work.drafts)
        for place, token_id in enumerate(token_ids, work.position):
            self.pages[work.pages[place // PAGE_TOKENS]][place % PAGE_TOKENS] = token_id
        if work.choose == "none":
            return ()
        assert work.slot is not None
        sampler, end = self.samplers[work.slot], work.position + len(token_ids)
        choices: list[Choice] = []
        for last in range(work.position + 1 if work.choose == "every" or work.drafts else end, end + 1):
            history = [self.pages[work.pages[place // PAGE_TOKENS]][place % PAGE_TOKENS] for place in range(last)]
            assert None not in history, "a token that was never written"
            try:
                token_id = self.next_token(history, sampler)  # type: ignore[arg-type]
            except LLMCliError as error:
                return tuple(choices) if work.drafts and choices else error
            choices.append(Choice(token_id, None, float(last) if sampler.params.mirostat_tau else None))
            if work.drafts and (*work.drafts, None)[len(choices) - 1] != token_id:
                break
        return tuple(choices)


class PageStep:
    """The choices."""

    def __init__(self, chosen: list[Chosen], prompt_seconds: float, lengths: Sequence[int]):
        """`lengths` are the tokens of each span."""
        self._chosen = chosen
        self._lengths = lengths
        self._prompt_seconds = prompt_seconds

    def choices(self) -> list[Chosen]:
        return self._chosen

    def logits(self, span: int, first: int = 0) -> AllLogits:
        """Token 3 is likeliest by far."""
        logits = np.zeros((max(self._lengths[span] - first, 1), VOCAB_SIZE), np.float32)
        logits[:, 3] = 10 + np.log(VOCAB_SIZE - 1)
        return logits

    def prompt_seconds(self) -> float:
        return self._prompt_seconds
