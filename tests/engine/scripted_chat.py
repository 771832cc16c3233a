"""A runner that plays one script for each answer and counts what it computes."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from page_device import PageDevice, PageStep

from llmcli.engine.chat import Chat, ChatSettings
from llmcli.engine.chat_events import AnswerPiece, ChatEvent, TurnFinished, TurnStarted
from llmcli.runners.step_device import Work
from llmcli.runners.stepping import SteppingRunner
from llmcli.sampling.params import Sampler, SamplingParams
from llmcli.tokenizer.base import Tokenizer, decode
from llmcli.tokenizer.chat_encoding import ChatTemplate, turn_end_token_ids


class ChatModel(NamedTuple):
    """The parts of a model folder that a conversation needs."""

    folder: Path
    tokenizer: Tokenizer
    template: ChatTemplate


class ScriptedChatRunner(SteppingRunner):
    """Plays `script` after each prompt; it may be interrupted within a prompt, or within an answer.

    Attributes: prompts, each with how many of its tokens were computed; samplers, one for each prompt
    """

    def __init__(self, max_seq_len: int = 2_000, chunk: int = 10_000):
        self.script: Sequence[int] = ()
        self.prompts: list[tuple[tuple[int, ...], int]] = []
        self.samplers: list[Sampler] = []
        self.interrupt_decode_after = 10**9
        self.interrupt_prefill_after = 10**9
        self.device = _Device(self, max_seq_len, chunk)
        super().__init__(self.device)

    @property
    def row(self) -> list[int]:
        """The tokens in the row of the conversation."""
        (row,) = self._rows
        return list(self.token_ids(row))

    def open(self, prompt: Sequence[int], sampler: Sampler | None = None, said: Sequence[int] = ()) -> int:
        row = super().open(prompt, sampler)
        self._begin(row, prompt, sampler)
        return row

    def change_prompt(self, row: int, prompt: Sequence[int], sampler: Sampler | None = None) -> None:
        super().change_prompt(row, prompt, sampler)
        self._begin(row, prompt, sampler)

    def next_token(self, history: Sequence[int], sampler: Sampler) -> int:
        num_drawn = len(history) - len(self.prompts[-1][0])
        if num_drawn == self.interrupt_decode_after:
            raise KeyboardInterrupt
        return self.script[num_drawn]

    def _begin(self, row: int, prompt: Sequence[int], sampler: Sampler | None) -> None:
        assert sampler is not None
        self.prompts.append((tuple(prompt), len(prompt) - self.num_tokens(row)))
        self.samplers.append(sampler)


class _Device(PageDevice):
    """Has a vocabulary for every tokenizer."""

    def __init__(self, runner: ScriptedChatRunner, max_seq_len: int, chunk: int):
        super().__init__(runner.next_token, max_seq_len=max_seq_len, chunk=chunk)
        self.config = SimpleNamespace(vocab_size=1_000_000)
        self._runner = runner

    def run(self, works: Sequence[Work]) -> PageStep:
        prompt, num_computed = self._runner.prompts[-1]
        is_prompt = works[0].position < len(prompt)
        if is_prompt and works[0].position - (len(prompt) - num_computed) >= self._runner.interrupt_prefill_after:
            raise KeyboardInterrupt
        return super().run(works)


class ScriptedChat:
    """A `Chat` whose answers are given as texts, which are encoded and end as a turn ends in the template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, runner: Any = None, **settings: Any):
        self.tokenizer = tokenizer
        self.runner = runner or ScriptedChatRunner()
        self.ends = turn_end_token_ids(tokenizer, template)
        sampler = Sampler(SamplingParams(), seed=1, eos_token_ids=self.ends | tokenizer.eos_token_ids)
        self.chat = Chat(self.runner, tokenizer, template, ChatSettings(sampler, **settings))

    def ids(self, text: str, *, ends: bool = True) -> list[int]:
        if ends and not self.ends:  # a model that continues with the user's part
            space = "" if self.tokenizer.strips_leading_space else " "
            text = f"{space}{text}{self.chat.template.stop_strings[0]}"
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        return [*token_ids, *sorted(self.ends)[:1]] if ends else token_ids

    def tokenizer_text(self, token_ids: Sequence[int]) -> str:
        return decode(self.tokenizer, token_ids, at_start=True)

    def say(self, message: str, answer: str | Sequence[int]) -> list[ChatEvent]:
        return self.run(self.chat.send(message), answer)

    def run(self, events: Iterator[ChatEvent], answer: str | Sequence[int]) -> list[ChatEvent]:
        """The events for a caller that handles Ctrl-C."""
        self.runner.script = self.ids(answer) if isinstance(answer, str) else answer
        seen: list[ChatEvent] = []
        try:
            for event in events:
                seen.append(event)
        except KeyboardInterrupt:
            seen += self.chat.interrupt()
        finally:
            self.runner.interrupt_decode_after = self.runner.interrupt_prefill_after = 10**9
        return seen


def started(events: list[ChatEvent]) -> TurnStarted:
    (event,) = [event for event in events if isinstance(event, TurnStarted)]
    return event


def finished(events: list[ChatEvent]) -> TurnFinished:
    (event,) = [event for event in events if isinstance(event, TurnFinished)]
    return event


def text_of(events: list[ChatEvent], part: str = "answer") -> str:
    return "".join(event.text for event in events if isinstance(event, AnswerPiece) and event.part == part)
