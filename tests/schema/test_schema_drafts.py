"""Texts with a schema are the same with drafts and without, on the CPU and on a card that numpy simulates.

`--schemas N` chooses how many: N / 16 schemas and as many expressions.
"""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from made_schemas import make_regexes, make_schemas
from simulated_card import simulate
from tiny_models import BOS_ID, EOS_ID, write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.engine.draft_sources import NgramSource
from llmcli.engine.drafts import Drafting
from llmcli.engine.request import Failed, Finished, Request
from llmcli.engine.scheduler import Scheduler
from llmcli.runners.base import Runner
from llmcli.runners.cuda.load import load as load_on_card
from llmcli.runners.numpy.load import load
from llmcli.sampling.params import Sampler, SamplingParams
from llmcli.schema.grammar import Grammar, choice_grammar, json_schema_grammar, regex_grammar
from llmcli.schema.schema import Schema, Vocabulary
from llmcli.tokenizer.base import Tokenizer
from llmcli.tokenizer.load import load_tokenizer

MAX_SEQ_LEN = 96
# As in the command line, and with drafts at every place.
LEAST = {"--draft auto": 0, "--draft ngram": 1, "always": 7}


class Model:
    """A tiny random model, whose tokens are bytes."""

    def __init__(self, folder: Path, card: Any):
        self.card = card
        self.opened = open_model(folder)
        self.tokenizer: Tokenizer = load_tokenizer(folder)
        self.vocabulary = Vocabulary(self.tokenizer, {EOS_ID}, 288)

    def load(self, num_rows: int) -> Runner:
        sizes = {"max_seq_len": MAX_SEQ_LEN, "num_rows": num_rows}
        if self.card is None:
            return load(self.opened, **sizes)
        return load_on_card(self.opened, **sizes, device=self.card, uses_graphs=False)

    def texts(self, num_rows: int, requests: Sequence[Request], drafting: Drafting | None) -> dict[object, object]:
        scheduler, texts = Scheduler(self.load(num_rows), self.tokenizer, drafting=drafting), dict[object, object]()
        for request in requests:
            scheduler.submit(request)
        while not scheduler.is_idle:
            for event in scheduler.step():
                if isinstance(event, Finished):
                    ended = event.token_ids, event.text, event.finish_reason, event.is_complete
                    texts[event.request, event.sample] = ended
                elif isinstance(event, Failed):
                    texts[event.request, event.sample] = str(event.error)
        return texts


@pytest.fixture(scope="module", params=["CPU", "card"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        card = simulate(monkeypatch) if request.param == "card" else None
        yield Model(write_tiny_llama(tmp_path_factory.mktemp("drafted") / "model"), card)


def grammars(count: int) -> list[Grammar]:
    schemas = [json_schema_grammar("--schema", json.dumps(schema)) for schema in make_schemas(count, seed=5)]
    regexes = [regex_grammar("--regex", regex) for regex in make_regexes(count, seed=5)]
    words = choice_grammar("--choice", ["a long way to go and to come", "a long way to go and to stay", "日本"])
    return [*(one for pair in zip(schemas, regexes, strict=True) for one in pair), words]


def requests_of(model: Model, grammar: Grammar, rng: random.Random) -> list[Request]:
    """One text, samples of a prompt, or a text with and one without the schema; greedy and not."""
    schema, how = Schema(grammar, model.vocabulary), rng.choice(["alone", "samples", "beside"])
    requests = []
    for held in (schema, None)[: 2 if how == "beside" else 1]:
        prompt = (BOS_ID, *[rng.randrange(97, 100) for _ in range(rng.randint(1, 30))])
        params = SamplingParams(temperature=rng.choice([0.0, 1.0, 1.5]))
        ends = frozenset({EOS_ID})
        sampler = Sampler(params, seed=rng.randrange(10**6), num_prompt_tokens=len(prompt), eos_token_ids=ends)
        samples = (0, 1, 2) if how == "samples" else (0,)
        requests.append(Request(prompt, sampler, samples, rng.choice([7, 40, None]), schema=held))
    return requests


def test_drafts_change_no_held_text(model: Model, num_schemas: int) -> None:
    num_kept, num_texts = dict.fromkeys(LEAST, 0), 0
    for number, grammar in enumerate(grammars(num_schemas // 16)):
        rng = random.Random(number)
        requests, num_rows = requests_of(model, grammar, rng), rng.choice([1, 2, 4])
        expected = model.texts(num_rows, requests, None)
        num_texts += len(expected)
        # A simulated card is slow: always, and one of the others in turn.
        left_out = None if model.card is None else [*LEAST][number % 2]
        for name in LEAST.keys() - {left_out}:
            drafting = Drafting(NgramSource(), least=LEAST[name])
            assert model.texts(num_rows, requests, drafting) == expected, (number, name, grammar)
            num_kept[name] += drafting.usage.num_kept
    print(f"{num_texts} texts, drafts that were kept: {num_kept}")
    assert num_kept["always"] > num_texts


@pytest.mark.parametrize("num_held_tokens", [3, 31])
def test_a_free_text_beside_a_held_one_has_drafts(model: Model, num_held_tokens: int) -> None:
    """For its mask the text with the schema reads the latest step, before the free text has read its earlier ones."""
    held = Schema(regex_grammar("--regex", "[a-z ]{60}"), model.vocabulary)
    ends, params = frozenset({EOS_ID}), SamplingParams(temperature=0.0)
    requests = []
    for schema, prompt in ((held, (BOS_ID, *range(97, 96 + num_held_tokens))), (None, (BOS_ID, *(97, 98, 99) * 4))):
        sampler = Sampler(params, seed=1, num_prompt_tokens=len(prompt), eos_token_ids=ends)
        requests.append(Request(prompt, sampler, (0,), 50, schema=schema))
    expected = model.texts(2, requests, None)
    for name, least in LEAST.items():
        assert model.texts(2, requests, Drafting(NgramSource(), least=least)) == expected, name
