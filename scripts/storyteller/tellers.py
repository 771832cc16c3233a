"""The seam between the examination and what generates the text: conversations in, replies out, by llmcli's engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path

from llmcli.cli.device_choice import RunnerOptions
from llmcli.cli.prompt import SamplerFlags
from llmcli.cli.session import EncodedPrompt, open_session
from llmcli.cli.terminal import terminal
from llmcli.engine.request import Finished, Request
from llmcli.engine.scheduler import Generation
from llmcli.tokenizer.chat_encoding import encode_chat

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply, and whether the teller ended it by itself."""

    text: str
    is_finished: bool


# What to answer: a conversation, or a text to continue.
Prompt = list[Message] | str
# Replies to prompts, in order; reply k is drawn with the k-th seed from the given one on.
Teller = Callable[[Sequence[Prompt], int], list[Reply]]
# Enough of a continuation to see whether its words are words.
CONTINUATION_TOKENS = 200
# As `llmcli generate` runs so small a model: in float32 by numpy. torch, which `--dtype float32` asks for, takes nearly
# twice the time.
ON_NUMPY = RunnerOptions(device="cpu", dtype="auto", num_threads=1)


class Voice:
    """A model folder, loaded to answer as `llmcli generate --chat` does."""

    def __init__(self, folder: Path, preset: str, options: RunnerOptions = ON_NUMPY) -> None:
        terminal.is_quiet = True
        self.session = open_session(str(folder))
        self.template, self.turn_end_token_ids = self.session.open_template(None)
        self.params = self.session.resolve_sampling({}, preset).params
        self.context = self.session.resolve_context(None)
        self.runner, _ = self.session.load_runner(options, self.context)

    def reply(self, messages: Sequence[Message], seed: int) -> Reply:
        """Answer the last message."""
        return self._generate(self.request(messages, seed))

    def go_on(self, text: str, seed: int) -> Reply:
        """Continue a text for a while, as `llmcli generate` does."""
        return self._generate(self._request(self.session.encode_prompt(text), seed, CONTINUATION_TOKENS))

    def request(self, messages: Sequence[Message], seed: int) -> Request:
        """The request for an answer to the last message."""
        token_ids = tuple(encode_chat(self.session.tokenizer, self.template, messages))
        prompt = EncodedPrompt("", token_ids, at_start=True, turn_end_token_ids=self.turn_end_token_ids)
        return self._request(prompt, seed, None)

    def _request(self, prompt: EncodedPrompt, seed: int, max_new_tokens: int | None) -> Request:
        return self.session.request(
            prompt,
            self.session.sampler(self.params, seed, prompt, SamplerFlags()),
            samples=(0,),
            max_new_tokens=self.session.limit_new_tokens(max_new_tokens, len(prompt.token_ids), self.context),
            stop_strings=(),
        )

    def _generate(self, request: Request) -> Reply:
        generation = Generation(self.runner, self.session.tokenizer, request)
        (finished,) = (event for event in generation.events() if isinstance(event, Finished))
        return Reply(finished.text, finished.finish_reason == "eos")


@cache
def _voice(folder: Path, preset: str) -> Voice:
    """The voice of this process."""
    return Voice(folder, preset)


def _reply_to_group(folder: Path, preset: str, group: list[tuple[Prompt, int]]) -> list[Reply]:
    voice = _voice(folder, preset)
    return [
        voice.go_on(prompt, seed) if isinstance(prompt, str) else voice.reply(prompt, seed) for prompt, seed in group
    ]


def _groups(prompts: Sequence[Prompt], seed: int) -> list[list[tuple[Prompt, int]]]:
    """Prompts with their seeds; those that differ in the last message only stay together: their past is read once."""
    seeded = [(prompt, seed + index) for index, prompt in enumerate(prompts)]
    return [
        list(group)
        for _, group in groupby(seeded, key=lambda item: (isinstance(item[0], list) and item[0][:-1]) or item[1])
    ]


class PooledTeller:
    """A teller over several processes, each with the model loaded; use it in a `with`."""

    def __init__(self, folder: Path, preset: str, workers: int) -> None:
        self._place = folder, preset
        # Spawned: a fork of a process that has used torch's threads may hang.
        self._pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))

    def __enter__(self) -> PooledTeller:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def __call__(self, prompts: Sequence[Prompt], seed: int) -> list[Reply]:
        """Replies in order."""
        jobs = [self._pool.submit(_reply_to_group, *self._place, group) for group in _groups(prompts, seed)]
        return [reply for job in jobs for reply in job.result()]
