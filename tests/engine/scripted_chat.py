"""A runner that plays one script for each answer and counts what a real one would compute."""

from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from llmcli.engine.chat import Chat, ChatSettings
from llmcli.engine.chat_events import ChatEvent, TurnFinished, TurnStarted
from llmcli.engine.reasoning import Piece
from llmcli.runners.base import Logits
from llmcli.sampling.params import SamplingParams
from llmcli.sampling.sampler import Sampler
from llmcli.tokenizer.base import Tokenizer
from llmcli.tokenizer.chat_encoding import turn_end_token_ids
from llmcli.tokenizer.chat_template import ChatTemplate
from llmcli.tokenizer.stream import decode


class ChatModel(NamedTuple):
    """What a conversation needs of a model folder."""

    folder: Path
    tokenizer: Tokenizer
    template: ChatTemplate


class ScriptedChatRunner:
    """Every sampled token counts as computed, so that a prefill computes exactly what the row does not share."""

    config: Any = SimpleNamespace(vocab_size=1_000_000)
    description = "scripted"
    num_rows = 1

    def __init__(self, max_seq_len: int = 100_000, chunk: int = 10_000):
        self.max_seq_len = max_seq_len
        self.chunk = chunk
        self.script: Sequence[int] = ()
        self.row: list[int] = []
        self.prefills: list[tuple[tuple[int, ...], int]] = []  # each prompt and how many of its tokens were computed
        self.samplers: list[Sampler] = []
        self.interrupt_decode_after = 10**9
        self.interrupt_prefill_after = 10**9

    def token_ids(self, row: int) -> Sequence[int]:
        return self.row

    def prefill(self, row: int, token_ids: Sequence[int]) -> Generator[int, None, None]:
        kept = 0
        while kept < min(len(self.row), len(token_ids) - 1) and self.row[kept] == token_ids[kept]:
            kept += 1
        del self.row[kept:]
        self.prefills.append((tuple(token_ids), len(token_ids) - kept))
        yield 0
        for begin in range(kept, len(token_ids), self.chunk):
            if begin - kept >= self.interrupt_prefill_after:
                raise KeyboardInterrupt
            self.row += token_ids[begin : begin + self.chunk]
            yield len(self.row) - kept

    def decode(self, rows: Sequence[int], samplers: Sequence[Sampler]) -> Generator[list[int], None, None]:
        self.samplers += samplers
        for index, token_id in enumerate(self.script):
            if len(self.row) == self.max_seq_len:
                return
            if index == self.interrupt_decode_after:
                raise KeyboardInterrupt
            self.row.append(token_id)
            yield [token_id]

    def logits(self, row: int) -> Logits:
        raise NotImplementedError

    def score(self, row: int, token_ids: Sequence[int], first: int) -> Any:
        raise NotImplementedError

    def truncate(self, row: int, num_tokens: int) -> None:
        del self.row[num_tokens:]

    def copy_row(self, source: int, target: int) -> None:
        raise NotImplementedError


class ScriptedChat:
    """A `Chat` whose answers are given as texts, which are encoded and end as a turn ends in the template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, runner: Any = None, **settings: Any):
        self.tokenizer = tokenizer
        self.runner = runner or ScriptedChatRunner()
        self.ends = turn_end_token_ids(tokenizer, template)
        sampler = Sampler(SamplingParams(), seed=1, eos_token_ids=self.ends | tokenizer.eos_token_ids)
        self.chat = Chat(self.runner, tokenizer, template, ChatSettings(sampler, **settings))

    def ids(self, text: str, *, ends: bool = True) -> list[int]:
        if ends and not self.ends:  # a model that goes on with the user's part
            space = "" if self.tokenizer.strips_leading_space else " "
            text = f"{space}{text}{self.chat.template.stop_strings[0]}"
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        return [*token_ids, *sorted(self.ends)[:1]] if ends else token_ids

    def tokenizer_text(self, token_ids: Sequence[int]) -> str:
        return decode(self.tokenizer, token_ids, at_start=True)

    def say(self, message: str, answer: str | Sequence[int]) -> list[ChatEvent]:
        return self.run(self.chat.send(message), answer)

    def run(self, events: Iterator[ChatEvent], answer: str | Sequence[int]) -> list[ChatEvent]:
        """What a caller sees who handles Ctrl-C."""
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
    return "".join(event.text for event in events if isinstance(event, Piece) and event.part == part)
