"""Random runs of a real model with every source of drafts: equal tokens, texts and ends; `--draft-evidence` of them.

Many runs are several tests, so that pytest-xdist can run them in parallel.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from scripted_drafts import ScriptedSource
from tiny_models import EOS_ID, write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.engine.draft_sources import DraftModel, NgramSource
from llmcli.engine.drafts import Drafting, DraftSource
from llmcli.engine.request import Failed, Finished, Request, Token
from llmcli.engine.scheduler import Scheduler
from llmcli.runners.base import Runner
from llmcli.sampling.params import Sampler, SamplingParams
from llmcli.tokenizer.load import load_tokenizer

TEMPERATURES = (0.0, 0.8, 1.3)
# One sampling step each, besides the temperature; names that are not in SamplingParams are fields of Sampler.
STEPS: dict[str, dict[str, Any]] = {
    "none": {},
    "logit_bias": {"logit_bias": {97: 2.0, 98: -float("inf")}},
    "sequence_bias": {"sequence_bias": (((97, 98), -float("inf")), ((99,), 3.0))},
    "begin_suppress": {"begin_suppress_token_ids": frozenset(range(97, 120))},
    "eos_ban": {"min_new_tokens": 9},
    "forced_eos": {"forced_eos_token_ids": frozenset({EOS_ID})},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "repetition_penalty": {"repetition_penalty": 1.4, "penalty_window": 20},
    "presence_penalty": {"presence_penalty": 1.0},
    "frequency_penalty": {"frequency_penalty": 0.7},
    "dry": {"dry_multiplier": 2.0, "dry_allowed_length": 1},
    "dynatemp": {"dynatemp_range": 0.5},
    "top_n_sigma": {"top_n_sigma": 1.0},
    "top_k": {"top_k": 8},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.6},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.01},
    "mirostat": {"mirostat_tau": 3.0, "mirostat_eta": 0.3},
}
MAX_SEQ_LEN = 96
Seen = dict[tuple[int, int], tuple[list[int], str, str]]  # by request and sample: tokens, text, end


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("evidence")
    return write_tiny_llama(folder / "model"), write_tiny_llama(folder / "drafter", num_hidden_layers=1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every part has all sampling steps."""
    if "numbers" in metafunc.fixturenames:
        most = metafunc.config.getoption("--draft-evidence")
        parts = max(1, most // len(STEPS))
        ends = [most * part // parts for part in range(parts + 1)]
        metafunc.parametrize("numbers", [range(*some) for some in pairwise(ends)], ids=str)


def make_requests(rng: random.Random, number: int) -> list[Request]:
    """One text, eight samples of a prompt, or three texts as in a batch; every temperature and step in turn."""
    step = list(STEPS.values())[number % len(STEPS)]
    temperature = TEMPERATURES[number % len(TEMPERATURES)]
    numbers = {name: value for name, value in step.items() if hasattr(SamplingParams, name)}
    others = {name: value for name, value in step.items() if name not in numbers}
    params = SamplingParams(**{"temperature": temperature, "top_p": 1.0, **numbers})
    word = [rng.randrange(97, 123) for _ in range(rng.randint(1, 9))]
    how = rng.choice(["alone", "samples", "batch"])
    requests = []
    for index in range(3 if how == "batch" else 1):
        prompt = (word * 20)[: rng.randint(1, 80)] if rng.random() < 0.7 else [rng.randrange(256) for _ in range(20)]
        ends = frozenset({EOS_ID, *rng.sample(range(256), rng.choice([0, 3]))})
        sampler = Sampler(
            params, seed=rng.randrange(10**6), num_prompt_tokens=len(prompt), eos_token_ids=ends, **others
        )
        stops = tuple(chr(rng.randrange(97, 123)) for _ in range(rng.choice([0, 0, 2])))
        samples = tuple(range(8)) if how == "samples" else (index,)
        requests.append(Request(tuple(prompt), sampler, samples, rng.choice([5, 12, 24, None]), stops))
    return requests


def run(runner: Runner, tokenizer: Any, requests: Sequence[Request], drafting: Drafting | None = None) -> Seen:
    scheduler = Scheduler(runner, tokenizer, drafting=drafting)
    for request in requests:
        scheduler.submit(request)
    said: Seen = {}
    pieces: dict[tuple[int, int], list[Token]] = {}
    while not scheduler.is_idle:
        for event in scheduler.step():
            if isinstance(event, Token):
                pieces.setdefault((event.request, event.sample), []).append(event)
            elif isinstance(event, Finished):
                tokens = pieces.get((event.request, event.sample), [])
                assert "".join(token.text for token in tokens) + event.tail == event.text
                assert [token.token_id for token in tokens] == list(event.token_ids)
                said[event.request, event.sample] = list(event.token_ids), event.text, event.finish_reason
            elif isinstance(event, Failed):
                tokens = pieces.get((event.request, event.sample), [])
                said[event.request, event.sample] = [one.token_id for one in tokens], "", str(event.error)
    return said


def next_of(texts: dict[tuple[int, int], list[int]], history: Sequence[int], sampler: Sampler) -> int:
    """The next token of the text without drafts."""
    text = texts[sampler.seed, sampler.sample_index]
    place = len(history) - sampler.num_prompt_tokens
    return text[place] if place < len(text) else 0


@pytest.mark.timeout(0)  # as long as the option says
def test_texts_with_drafts_are_those_without(
    models: tuple[Path, Path], load: Callable[..., Runner], numbers: range, request: pytest.FixtureRequest
) -> None:
    if "simulated" in request.node.name:  # it is slow
        numbers = numbers[::4]
    tokenizer = load_tokenizer(models[0])
    model, drafter = (open_model(folder) for folder in models)
    kept: dict[str, int] = {}
    for place, number in enumerate(numbers):
        rng = random.Random(number)
        requests = make_requests(rng, number)
        num_rows = rng.choice([1, 2, 3, 8])
        runner = load(model, max_seq_len=MAX_SEQ_LEN, num_rows=num_rows)
        expected = run(runner, tokenizer, requests)
        free_pages = runner.free_pages
        texts = {
            (requests[key - 1].sampler.seed, sample): token_ids for (key, sample), (token_ids, *_) in expected.items()
        }
        sources: dict[str, DraftSource] = {
            "ngram": NgramSource(),
            "model": DraftModel(load(drafter, max_seq_len=MAX_SEQ_LEN, num_rows=min(num_rows, 4))),
            "the model itself": DraftModel(load(model, max_seq_len=MAX_SEQ_LEN, num_rows=min(num_rows, 4))),
            "always wrong": ScriptedSource(partial(next_of, texts), 0.0, number),
            "mostly right": ScriptedSource(partial(next_of, texts), 0.8, number),
            "random": ScriptedSource(lambda history, sampler: 0, 0.5, number),
        }
        for index, (name, source) in enumerate(sources.items()):
            if name != "mostly right" and len(numbers) <= len(STEPS) and (index + place) % 3:
                continue  # a usual run has each other source for every third step
            drafting = Drafting(source, least=rng.randint(0, 7))
            found = run(runner, tokenizer, requests, drafting)
            assert found == expected, f"run {number}, {name}: {replace(requests[0], prompt_token_ids=())}"
            assert runner.free_pages == free_pages
            kept[name] = kept.get(name, 0) + drafting.usage.num_kept
    assert min(kept["ngram"] + kept["model"], kept["the model itself"], kept["mostly right"]) > 0
    assert kept["always wrong"] == 0
