"""Roads: how a text would have continued after a token that could have been drawn and was not.

A road has its text's seed, sample number, positions and settings. Every draw has the noise of the text's draw at the
same position, so a road differs by that token and what follows from it. Only the limit of new tokens is the road's
own: otherwise roads near the text's end would be too short to say anything.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from llmcli.engine.request import Failed, Finished, FinishReason, Request, Token
from llmcli.engine.scheduler import Scheduler
from llmcli.runners.base import Runner
from llmcli.sampling.chain import mu_behind
from llmcli.sampling.inspect import Inspection
from llmcli.tokenizer.base import StreamDecoder, Tokenizer

# A road ends with the first sentence that ends after ENOUGH_TOKENS tokens, and after MOST_TOKENS at the latest.
ENOUGH_TOKENS, MOST_TOKENS = 12, 40
_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’»)\]]*(?=\s)|[。！？]|\n")

RoadEnd = FinishReason | Literal["sentence", "tokens", "failed"]


@dataclass(frozen=True)
class Fork:
    """A token that was not drawn: its text, its position there (from 0), and its probability in the draw."""

    sample: int
    place: int
    token_id: int
    probability: float


@dataclass(frozen=True)
class RoadToken:
    """A token of a road: its probability in the model, and the text that became certain with it.

    The first token of a road has the `probability` of its fork.
    """

    token_id: int
    probability: float
    text: str


@dataclass(frozen=True)
class Road:
    """The tokens from the fork on, and why they end."""

    fork: Fork
    tokens: tuple[RoadToken, ...]
    end: RoadEnd


def find_forks(texts: Mapping[int, Sequence[Inspection]], count: int) -> list[Fork]:
    """The `count` tokens that were likeliest to be drawn and were not, the likeliest first.

    `texts` are the choices of each sample. Equal ones are sorted by sample, position and id.
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
    """Follows forks of a request's texts; cheap, as the request has `keeps_pages`.

    A Ctrl-C may come at any point; `found` then has the roads so far.
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
        """The final value of `num_tokens`, at most."""
        return MOST_TOKENS * len(self._roads)

    def found(self) -> list[Road]:
        """The roads so far in the order of their forks, without those that have not begun."""
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
    """A road under way; it counts as interrupted until it has ended."""

    def __init__(self, fork: Fork, said: Sequence[int], decoder: StreamDecoder):
        self.fork = fork
        self.end: RoadEnd = "interrupted"
        self._decoder = decoder
        self._num_said_characters = sum(len(decoder.push(token_id)) for token_id in said)
        self.tokens = [RoadToken(fork.token_id, fork.probability, decoder.push(fork.token_id))]

    def take(self, event: Token) -> None:
        """Take the next token; end after a sentence or at the most tokens."""
        assert event.inspection is not None
        probability = event.inspection.chosen.probability
        self.tokens.append(RoadToken(event.token_id, probability, self._decoder.push(event.token_id)))
        if num_kept := self._num_tokens_of_sentences():
            del self.tokens[num_kept:]
            self.end = "sentence"
        elif len(self.tokens) == MOST_TOKENS:
            self.end = "tokens"

    def finish(self, event: Finished) -> None:
        """Take the end of the text itself; what belongs to a stop string is cut off."""
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
        """The number of tokens up to the end of a sentence far enough from the fork; 0 if there is none yet."""
        if len(self.tokens) <= ENOUGH_TOKENS:
            return 0
        begins = [0]
        for token in self.tokens:
            begins.append(begins[-1] + len(token.text))
        text = "".join(token.text for token in self.tokens)
        match = _SENTENCE_END.search(text, begins[ENOUGH_TOKENS - 1])
        return 0 if match is None else sum(begin < match.end() for begin in begins[:-1])
