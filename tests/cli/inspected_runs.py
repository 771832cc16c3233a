"""Small runs with a view of every choice, made without a model: a test gives the probability of each token."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmcli.cli.output.base import Output, RunFacts
from llmcli.engine.request import Event, Finished, FinishReason, Timings, Token
from llmcli.engine.texts import StopStrings
from llmcli.sampling.inspect import inspect_choice
from llmcli.sampling.params import Sampler, SamplingParams, resolve
from llmcli.tokenizer.base import StreamDecoder, Tokenizer, TokenizerSettings

END = "</s>"  # a special token, without text


class PieceTokenizer(Tokenizer):
    """A vocabulary of given pieces; END is added as the last one."""

    def __init__(self, pieces: Sequence[str | bytes], strips_leading_space: bool = False) -> None:
        super().__init__(Path("tokenizer.json"), TokenizerSettings())
        self._pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self.vocab_size = len(pieces) + 1
        self.end_id = len(pieces)
        self.bos_token_id = None
        self.eos_token_ids = self.special_token_ids = frozenset({self.end_id})
        self.strips_leading_space = strips_leading_space

    def _encode(self, text: str, add_special_tokens: bool, parse_special_tokens: bool) -> list[int]:
        return [self._pieces.index(text.encode())] if text else []

    def token_id(self, content: str) -> int | None:
        return self.end_id if content == END else None

    def piece(self, token_id: int) -> str:
        if token_id == self.end_id:
            return END
        return self._pieces[token_id].decode(errors="replace") if token_id < self.end_id else ""

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id] if token_id < self.end_id else b""


def make_facts(
    tokenizer: Tokenizer, *, prompt: str = "", prompt_token_ids: tuple[int, ...] = (), samples: int = 1, **params: Any
) -> RunFacts:
    return RunFacts(
        model="models/tiny",
        name="models/tiny",
        prompt=prompt,
        lead=prompt,
        prompt_token_ids=prompt_token_ids,
        sampling=resolve({"temperature": 1.0, "top_p": 1.0, **params}, {}, "", {}),
        seed=7,
        samples=tuple(range(samples)),
        load_seconds=0.0,
        cache_type="float32",
        tokenizer=tokenizer,
    )


def make_logits(vocab_size: int, token_id: int, probability: float, seed: int = 0) -> np.ndarray:
    """Random logits that give `token_id` the given probability."""
    logits = np.random.default_rng([seed, token_id]).normal(size=vocab_size)
    others = np.exp(np.delete(logits, token_id)).sum()
    logits[token_id] = np.log(others * probability / (1 - probability))
    return logits.astype(np.float32)


def make_events(
    tokenizer: Tokenizer,
    choices: Sequence[tuple[int, float]],
    *,
    params: SamplingParams | None = None,
    sample: int = 0,
    reason: FinishReason = "length",
    stop_strings: tuple[str, ...] = (),
    at_start: bool = False,
    num_alternatives: int = 3,
) -> list[Event]:
    """The events of a sample of (token id, probability by the model), with its text held back as the engine does."""
    sampler = Sampler(params or SamplingParams(temperature=1, top_p=1), seed=7, sample_index=sample)
    decoder, stops = StreamDecoder(tokenizer, at_start=at_start), StopStrings(stop_strings)
    events: list[Event] = []
    whole = ""
    for index, (token_id, probability) in enumerate(choices):
        text = ""
        if token_id not in tokenizer.eos_token_ids:
            text, is_stopped = stops.push(decoder.push(token_id))
            reason = "stop" if is_stopped else reason
        whole += text
        logits = make_logits(tokenizer.vocab_size, token_id, probability, index)
        history = [choice for choice, _ in choices[:index]]
        events.append(
            Token(sample, token_id, text, inspect_choice(logits, history, sampler, token_id, num_alternatives))
        )
    tail = ""
    if reason != "stop":
        text, is_stopped = stops.push(decoder.flush())
        tail = text if is_stopped else text + stops.flush()
    ids = tuple(token_id for token_id, _ in choices)
    return [*events, Finished(sample, tail, whole + tail, ids, reason, Timings(0, 0.0, 0.0, 0, 0.0))]


def play(output: Output, events: Sequence[Event]) -> list[Finished]:
    """Give an output the events and the end."""
    finished = [event for event in events if isinstance(event, Finished)]
    for event in events:
        output.show(event)
    output.finish(finished)
    return finished
