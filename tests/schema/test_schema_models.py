"""Texts of trained models at temperature 1.5 fit their schema; cut ones can be completed.

One model, one vocabulary and one scheduler serve all cases. `--schemas N` chooses how many there are.
"""

import decimal
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest
from held_walks import Walk, extend, parse_exactly, schema_validator
from made_schemas import KINDS, USUAL_SCHEMAS, make_regexes, make_schemas

from llmcli.checkpoint.model import open_model
from llmcli.engine.request import Finished, Request
from llmcli.engine.scheduler import Scheduler
from llmcli.resources import STORYTELLER, resource_folder
from llmcli.runners.numpy.load import load
from llmcli.sampling.params import Sampler, SamplingParams
from llmcli.schema.grammar import Grammar, json_schema_grammar, regex_grammar
from llmcli.schema.schema import Schema, Vocabulary
from llmcli.tokenizer.load import load_tokenizer

PROMPT = "Once upon a time"
LONGEST = 60
NUM_WAITING = 64
SHARE = 10  # of the schemas used without a model, but one of each kind

Check = Callable[[str], None]  # raises for a text that is not valid


@dataclass
class Case:
    """A schema or an expression, and how one of its texts is judged."""

    name: str
    grammar: Grammar
    check: Check


@dataclass
class Counts:
    """Texts that ended by themselves, and cut ones."""

    ended: int = 0
    cut: int = 0


class Model:
    """A trained model on the CPU, and its vocabulary."""

    def __init__(self, folder: Path):
        opened = open_model(folder)
        self.tokenizer = load_tokenizer(folder)
        ends = self.tokenizer.eos_token_ids or {opened.config.vocab_size - 1}
        self.vocabulary = Vocabulary(self.tokenizer, ends, opened.config.vocab_size)
        self.runner = load(opened, max_seq_len=128, num_rows=8)
        self.prompt = tuple(self.tokenizer.encode(PROMPT))

    def request(self, schema: Schema, seed: int) -> Request:
        """Every second text is separate, so the model's first space is dropped."""
        sampler = Sampler(
            SamplingParams(temperature=1.5),
            seed=seed,
            num_prompt_tokens=len(self.prompt),
            eos_token_ids=self.vocabulary.eos_token_ids,
        )
        return Request(self.prompt, sampler, (0,), LONGEST, schema=schema, at_start=bool(seed % 2))

    def judge(self, case: Case, request: Request, finished: Finished) -> bool:
        """Whether the text ended by itself; others are completed first."""
        if finished.finish_reason == "eos":
            assert finished.is_complete
            case.check(finished.text)
            return True
        assert finished.finish_reason == "length"
        pieces = b"".join(self.tokenizer.token_bytes(token_id) for token_id in finished.token_ids)
        if request.at_start and self.tokenizer.strips_leading_space:
            pieces = pieces.removeprefix(b" ")
        assert pieces.decode(errors="ignore") == finished.text, case.name
        begun = Walk(list(finished.token_ids), pieces, False)
        assert request.schema is not None
        rest = extend(request.schema, self.tokenizer, begun, at_start=request.at_start)
        assert rest is not None, (case.name, pieces)
        case.check((pieces + rest).decode())
        return False

    def run(self, cases: list[Case], num_seeds: int) -> Counts:
        """Every case with each seed, many at once."""
        scheduler, counts = Scheduler(self.runner, self.tokenizer), Counts()
        schemas = ((case, Schema(case.grammar, self.vocabulary)) for case in cases)
        left = ((case, self.request(schema, seed)) for case, schema in schemas for seed in range(num_seeds))
        running: dict[int, tuple[Case, Request]] = {}
        while True:
            for case, request in islice(left, NUM_WAITING - len(running)):
                running[scheduler.submit(request)] = case, request
            if not running:
                return counts
            for event in scheduler.step():
                if isinstance(event, Finished):
                    if self.judge(*running.pop(event.request), event):
                        counts.ended += 1
                    else:
                        counts.cut += 1


@pytest.fixture(scope="module", params=["stories260K", "storyteller"])
def model(request: pytest.FixtureRequest) -> Model:
    if request.param == "storyteller":
        return Model(resource_folder(STORYTELLER))
    return Model(request.getfixturevalue("stories260k"))


@pytest.fixture(autouse=True)
def exact_numbers() -> Iterator[None]:
    with decimal.localcontext() as context:
        context.prec = 3000
        yield


@pytest.fixture
def num_seeds(num_schemas: int) -> int:
    """A usual run has a text of either beginning for each schema."""
    return 5 if num_schemas > USUAL_SCHEMAS else 2


def json_cases(count: int) -> list[Case]:
    def case(schema: dict) -> Case:  # type: ignore[type-arg]
        text, validator = json.dumps(schema), schema_validator(schema)
        check = lambda value: validator.validate(parse_exactly(value))  # noqa: E731
        return Case(text, json_schema_grammar("--schema", text), check)

    return [case(schema) for schema in make_schemas(count, seed=1)]


def regex_cases(count: int) -> list[Case]:
    def check(regex: str, text: str) -> None:
        assert re.fullmatch(regex, text, re.ASCII), (regex, text)

    return [
        Case(regex, regex_grammar("--regex", regex), lambda text, regex=regex: check(regex, text))  # type: ignore[misc]
        for regex in make_regexes(count, seed=1)
    ]


def test_json_of_a_model_is_valid(model: Model, num_schemas: int, num_seeds: int) -> None:
    counts = model.run(json_cases(max(len(KINDS), num_schemas // SHARE)), num_seeds)
    print(f"schemas: {counts}")
    assert counts.ended > 0
    assert counts.cut > 0


def test_texts_of_a_model_match_their_expressions(model: Model, num_schemas: int, num_seeds: int) -> None:
    counts = model.run(regex_cases(max(6, num_schemas * 2 // 5 // SHARE)), num_seeds)
    print(f"expressions: {counts}")
    assert counts.ended > counts.cut
