"""The storyteller by numpy against the reference, the torch runner: same seed, same text."""

import pytest
from row_steps import GREEDY, WARM, go_on, run_prompt

from llmcli.checkpoint.model import open_model
from llmcli.resources import STORYTELLER, resource_folder
from llmcli.runners.base import Runner
from llmcli.runners.numpy.load import load as load_on_numpy
from llmcli.runners.torch.load import load as load_on_torch
from llmcli.sampling.params import Sampler, SamplingParams
from llmcli.tokenizer.load import load_tokenizer

NUM_TOKENS = 200
NARROW = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, repetition_penalty=1.1)
SAMPLERS = {"greedy": GREEDY, "warm": Sampler(WARM, seed=11), "filters": Sampler(NARROW, seed=12, num_prompt_tokens=5)}


@pytest.fixture(scope="module")
def runners() -> list[Runner]:
    model = open_model(resource_folder(STORYTELLER))
    return [load(model, max_seq_len=512) for load in (load_on_torch, load_on_numpy)]


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_tokens_are_those_of_torch(runners: list[Runner], name: str) -> None:
    prompt = load_tokenizer(resource_folder(STORYTELLER)).encode("Once upon a time, a dog")
    texts = []
    for runner in runners:
        row = runner.open(prompt, SAMPLERS[name])
        run_prompt(runner, row, prompt)
        texts.append(go_on(runner, row, NUM_TOKENS))
        runner.close(row)
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 40  # a text, no loop
