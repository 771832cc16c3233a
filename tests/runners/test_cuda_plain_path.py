"""Decoding's fast path against the plain one: in 2,000 tokens of the built-in storyteller both must be the same.

Fast: steps captured as graphs, each queued before the last token is taken, launches that overlap, sampling on the card.
Plain: each token by itself, its kernels launched one after the other, and the next one chosen by the host.
"""

from collections.abc import Callable, Generator
from itertools import count
from typing import Any

import pytest
from conformance import prefill

from llmcli.checkpoint.model import open_model
from llmcli.kernels.device import Device
from llmcli.resources import STORYTELLER, resource_folder
from llmcli.runners.base import Runner
from llmcli.sampling.chain import choose
from llmcli.sampling.params import SamplingParams
from llmcli.sampling.sampler import Sampler
from llmcli.tokenizer.load import load_tokenizer

NUM_TOKENS = 2000
CONTEXT = 1024
BEGINNINGS = ("Once upon a time", "In a teapot on the hill", "The fox", "One rainy evening", "Far away,", "A duck")
FOLDER = resource_folder(STORYTELLER)

Tokens = Callable[[Runner, Sampler], Generator[int, None, None]]


def fast(runner: Runner, sampler: Sampler) -> Generator[int, None, None]:
    """One decode, as long as the story is."""
    steps = runner.decode([0], [sampler])
    try:
        for (token_id,) in steps:
            yield token_id
    finally:
        steps.close()


def plain(runner: Runner, sampler: Sampler) -> Generator[int, None, None]:
    """No decode at all: every token is a prompt of one token more."""
    while len(runner.token_ids(0)) < runner.max_seq_len:
        token_ids = list(runner.token_ids(0))
        token_ids.append(choose(runner.logits(0), token_ids, sampler).token_id)
        assert prefill(runner, token_ids) == 1
        yield token_ids[-1]


def tell(runner: Runner, tokens: Tokens, params: SamplingParams, num_tokens: int) -> list[tuple[list[int], bytes]]:
    """Stories one after the other until they have so many tokens, each with the logits after its last token."""
    tokenizer = load_tokenizer(FOLDER)
    stories = []
    for number, beginning in zip(count(), BEGINNINGS, strict=False):
        runner.truncate(0, 0)
        prefill(runner, list(tokenizer.encode(beginning)))
        story: list[int] = []
        steps = tokens(runner, Sampler(params, seed=number))
        for token_id in steps:
            story.append(token_id)
            num_tokens -= 1
            if num_tokens == 0 or token_id in tokenizer.eos_token_ids:
                break
        steps.close()
        stories.append((story, runner.logits(0).tobytes()))
        if num_tokens == 0:
            return stories
    raise AssertionError(f"the stories end {num_tokens} tokens too early")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.98)],
    ids=["greedy", "sampled"],
)
def test_the_fast_path_tells_what_the_plain_one_does(
    params: SamplingParams, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmcli.runners.cuda.load import load

    stories: list[Any] = []
    launched: list[list[str]] = []
    for tokens in (fast, plain):
        card = Device.open(0)
        if tokens is plain:
            monkeypatch.setattr(card, "_can_overlap", False)
        runner = load(open_model(FOLDER), device=card, dtype=dtype, max_seq_len=CONTEXT)
        card.trace = []
        stories.append(tell(runner, tokens, params, NUM_TOKENS))
        launched.append([stem for stem, _ in card.trace])
    assert stories[0] == stories[1]
    assert sum(len(story) for story, _ in stories[0]) == NUM_TOKENS
    # The two graphs were captured once; a token of the plain path is launched layer by layer.
    assert launched[0].count("sample_token") == 2
    assert launched[1].count("sample_token") == 0
    assert launched[1].count("attention_decode") == NUM_TOKENS * runner.config.num_hidden_layers
