"""The fast path against the plain one: in 2,000 tokens of the built-in storyteller both must be the same.

Fast: the scheduler's steps, captured as graphs, each queued before the last token is taken, launches that overlap,
sampling on the card. Plain: each token is a step by itself, its kernels launched one after the other, and the host
chooses it from the logits of the step before.
"""

from collections.abc import Callable
from itertools import count

import pytest
from launched import launched_by
from row_steps import run_prompt, single_steps

from llmcli.checkpoint.model import open_model
from llmcli.engine.request import Finished, KeptRow, Request
from llmcli.engine.scheduler import Scheduler
from llmcli.kernels.device import Device
from llmcli.resources import STORYTELLER, resource_folder
from llmcli.runners.base import MAX_SPAN, Runner
from llmcli.sampling.chain import choose
from llmcli.sampling.params import Sampler, SamplingParams
from llmcli.tokenizer.load import load_tokenizer

NUM_TOKENS = 2000
CONTEXT = 1024
BEGINNINGS = ("Once upon a time", "In a teapot on the hill", "The fox", "One rainy evening", "Far away,", "A duck")
FOLDER = resource_folder(STORYTELLER)
TOKENIZER = load_tokenizer(FOLDER)

Story = tuple[list[int], bytes]  # its tokens, and the logits after the last one
Tell = Callable[[Runner, tuple[int, ...], Sampler, int], Story]


def fast(runner: Runner, prompt: tuple[int, ...], sampler: Sampler, most: int) -> Story:
    """A request of a scheduler; its cache shows in the logits after the last token."""
    kept = KeptRow()
    scheduler = Scheduler(runner, TOKENIZER)
    scheduler.submit(Request(prompt, sampler, (0,), most, kept_row=kept))
    while not scheduler.is_idle:
        events = scheduler.step()
    (finished,) = (event for event in events if isinstance(event, Finished))
    assert kept.row is not None
    token_ids = list(finished.token_ids)
    runner.keep(kept.row, len(prompt) + len(token_ids) - 1)
    logits = single_steps(runner, kept.row, token_ids[-1:])
    runner.close(kept.row)
    return token_ids, logits.tobytes()


def plain(runner: Runner, prompt: tuple[int, ...], sampler: Sampler, most: int) -> Story:
    """No choice on the card at all."""
    row = runner.open(prompt)
    logits, token_ids = run_prompt(runner, row, prompt, choose="none"), list(prompt)
    while len(token_ids) < len(prompt) + most and token_ids[-1] not in TOKENIZER.eos_token_ids:
        token_ids.append(choose(logits, token_ids, sampler).token_id)
        logits = single_steps(runner, row, token_ids[-1:])[0]
    runner.close(row)
    return token_ids[len(prompt) :], logits.tobytes()


def tell(runner: Runner, way: Tell, params: SamplingParams, num_tokens: int) -> list[Story]:
    """Stories one after the other up to a number of tokens."""
    stories: list[Story] = []
    for number, beginning in zip(count(), BEGINNINGS, strict=False):
        prompt = tuple(TOKENIZER.encode(beginning))
        most = min(num_tokens, CONTEXT - len(prompt))
        sampler = Sampler(params, seed=number, eos_token_ids=TOKENIZER.eos_token_ids, num_prompt_tokens=len(prompt))
        stories.append(way(runner, prompt, sampler, most))
        num_tokens -= len(stories[-1][0])
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
    from llmcli.runners.cuda.load.model import load

    told: list[list[Story]] = []
    launched: list[list[str]] = []
    for way in (fast, plain):
        card = Device.open(0)
        if way is plain:
            monkeypatch.setattr(card, "_can_overlap", False)
        model = open_model(FOLDER)
        runner = load(model, device=card, dtype=dtype, max_seq_len=CONTEXT, uses_graphs=way is fast)
        card.noted = []
        told.append(tell(runner, way, params, NUM_TOKENS))
        launched.append([stem for stem, _ in launched_by(card)])
    assert told[0] == told[1]
    stories = told[0]
    assert sum(len(story) for story, _ in stories) == NUM_TOKENS
    # The fast path chooses after each prompt, and from then on in a graph, captured once. The plain one launches a
    # token layer by layer; short prompts run as tokens do.
    assert launched[0].count("sample_token") == len(stories) + 1
    assert launched[1].count("sample_token") == 0
    num_short = sum(len(TOKENIZER.encode(beginning)) <= MAX_SPAN for beginning in BEGINNINGS[: len(stories)])
    attended = launched[1].count("attention_decode") + launched[1].count("attention_span")
    assert attended == (NUM_TOKENS + num_short) * runner.config.num_hidden_layers
