"""Roads: where a text would have gone behind a token that could have been drawn and was not.

A road has all that its text has but that one token: seed, sample number, positions, settings. Every draw has the noise
that the text's draw had at the same place, so a road differs by that token and what follows from it. Only the limit of
new tokens is the road's own: else those near the text's end would say nothing.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from llmcli.engine.events import Failed, Finished, FinishReason, Token
from llmcli.engine.request import Request
from llmcli.engine.scheduler import Scheduler
from llmcli.runners.base import Runner
from llmcli.sampling.filters import mu_behind
from llmcli.sampling.inspect import Inspection
from llmcli.tokenizer.base import StreamDecoder, Tokenizer

# A road ends with the first sentence that ends behind ENOUGH_TOKENS tokens, and after MOST_TOKENS at the latest.
ENOUGH_TOKENS, MOST_TOKENS = 12, 40
_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’»)\]]*(?=\s)|[。！？]|\n")

RoadEnd = FinishReason | Literal["sentence", "tokens", "failed"]


@dataclass(frozen=True)
class Fork:
    """A token that was not drawn: its text, its place there (from 0), and the probability that the draw gave it."""

    sample: int
    place: int
    token_id: int
    probability: float


@dataclass(frozen=True)
class RoadToken:
    """A token of a road: what the model gave it, and the text that became certain with it.

    `probability` of a road's first token is that of its fork.
    """

    token_id: int
    probability: float
    text: str


@dataclass(frozen=True)
class Road:
    """The tokens from the fork on, and why they end where they do."""

    fork: Fork
    tokens: tuple[RoadToken, ...]
    end: RoadEnd


def find_forks(texts: Mapping[int, Sequence[Inspection]], count: int) -> list[Fork]:
    """The `count` tokens that were likeliest to be drawn and were not, the likeliest first.

    `texts` are the choices of each sample. Of equals the one of the lower sample, place and id comes first.
    """
    forks = [
        Fork(sample, place, token.token_id, token.probability)
        for sample, choices in texts.items()
        for place, inspection in enumerate(choices)
        for token in inspection.left
        if token.token_id != inspection.chosen.token_id
    ]
    return sorted(forks, key=lambda fork: (-fork.probability, fork.sample, fork.place, fork.token_id))[:count]


class Roads:
    """Follows forks of the texts of a request; the request's `keeps_pages` makes that cheap.

    A Ctrl-C may strike anywhere; `found` then has the roads as far as they have come.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        request: Request,
        texts: Mapping[int, Sequence[Inspection]],
        forks: Sequence[Fork],
    ):
        self._scheduler = Scheduler(runner, tokenizer)
        self._running: dict[int, _RunningRoad] = {}
        self._roads: list[_RunningRoad] = []
        for fork in forks:
            choices = texts[fork.sample][: fork.place]
            said = tuple(choice.chosen.token_id for choice in choices)
            drawn = [*(choice.steps[-1].chosen_probability for choice in choices), fork.probability]
            road = _RunningRoad(fork, said, StreamDecoder(tokenizer, at_start=request.at_start))
            number = self._scheduler.submit(
                replace(
                    request,
                    sampler=replace(request.sampler, mirostat_mu=mu_behind(request.sampler, drawn)),
                    samples=(fork.sample,),
                    max_new_tokens=None,
                    num_alternatives=0,
                    said=(*said, fork.token_id),
                    keeps_pages=False,
                )
            )
            self._running[number] = road
            self._roads.append(road)

    @property
    def num_tokens(self) -> int:
        """Tokens so far; a road that has ended counts as one of MOST_TOKENS."""
        return sum(len(road.tokens) if road.end == "interrupted" else MOST_TOKENS for road in self._roads)

    @property
    def most_tokens(self) -> int:
        """What `num_tokens` comes to."""
        return MOST_TOKENS * len(self._roads)

    def found(self) -> list[Road]:
        """The roads so far, in the order of their forks, without those that have not begun."""
        return [road.so_far() for road in self._roads if len(road.tokens) > 1 or road.end != "interrupted"]

    def steps(self) -> Iterator[None]:
        """Follow all roads; yields after each step."""
        while not self._scheduler.is_idle:
            events = self._scheduler.step()
            for event in events:
                road = self._running.get(event.request)
                if road is None:
                    continue
                if isinstance(event, Token) and event.inspection is not None:
                    road.take(event)
                elif isinstance(event, Finished):
                    road.finish(event)
                elif isinstance(event, Failed):
                    road.end = "failed"
                if road.end != "interrupted":
                    del self._running[event.request]
                    self._scheduler.cancel(event.request)
            yield


class _RunningRoad:
    """A road that is still followed; it counts as interrupted until it has ended."""

    def __init__(self, fork: Fork, said: Sequence[int], decoder: StreamDecoder):
        self.fork = fork
        self.end: RoadEnd = "interrupted"
        self._decoder = decoder
        self._num_said_characters = sum(len(decoder.push(token_id)) for token_id in said)
        self.tokens = [RoadToken(fork.token_id, fork.probability, decoder.push(fork.token_id))]

    def take(self, event: Token) -> None:
        """Take the next token, and end behind a sentence or at the most tokens."""
        assert event.inspection is not None
        probability = event.inspection.chosen.probability
        self.tokens.append(RoadToken(event.token_id, probability, self._decoder.push(event.token_id)))
        if num_kept := self._num_tokens_of_sentences():
            del self.tokens[num_kept:]
            self.end = "sentence"
        elif len(self.tokens) == MOST_TOKENS:
            self.end = "tokens"

    def finish(self, event: Finished) -> None:
        """Take the end that the text itself would have had; what belongs to a stop string is cut off."""
        self.end = event.finish_reason
        if event.finish_reason == "stop":
            room = max(len(event.text) - self._num_said_characters, 0)
            for index, token in enumerate(self.tokens):
                self.tokens[index] = replace(token, text=token.text[:room])
                room -= min(len(token.text), room)

    def so_far(self) -> Road:
        """The road so far."""
        return Road(self.fork, tuple(self.tokens), self.end)

    def _num_tokens_of_sentences(self) -> int:
        """The tokens up to a sentence's end that is far enough from the fork; 0 if there is none yet."""
        if len(self.tokens) <= ENOUGH_TOKENS:
            return 0
        begins = [0]
        for token in self.tokens:
            begins.append(begins[-1] + len(token.text))
        text = "".join(token.text for token in self.tokens)
        match = _SENTENCE_END.search(text, begins[ENOUGH_TOKENS - 1])
        return 0 if match is None else sum(begin < match.end() for begin in begins[:-1])
