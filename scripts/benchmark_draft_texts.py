"""What drafts gain on a card: whole texts with and without them, in turns in one process, and steps behind long texts.

    python -m scripts.benchmark_draft_texts [SHAPE] [--tokens N] [--depth N]

- "right with chance 0.8": a source that knows the text, and lies otherwise.
- "quote": n-grams of a prompt that holds the text but for one token.
- "free": n-grams of a prompt that holds nothing of it, as `--draft auto` has them; what they cost.

Weights are random. Those of o_proj are zero, so a token follows from the one before, its place and the seed, and so a
prompt can hold a text. Times do not depend on the values of weights. Texts with and without drafts are compared.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from llmcli.checkpoint.model import open_model
from llmcli.checkpoint.random_weights import write_shape
from llmcli.engine.draft_sources import NgramSource
from llmcli.engine.drafts import Drafting, DraftSource
from llmcli.engine.request import Request, Token
from llmcli.engine.scheduler import Scheduler
from llmcli.measure.bench import measure_draft_steps
from llmcli.runners.base import Runner
from llmcli.runners.cuda.load.model import load
from llmcli.sampling.params import Sampler, SamplingParams
from llmcli.tokenizer.base import NoText

CHANCE = 0.8
ROUNDS = 3
SAMPLER = Sampler(SamplingParams(temperature=0.8, top_p=0.95), seed=1)


class KnowingSource:
    """Each draft is the text's next token with the chance of being right, else another one."""

    is_free = True

    def __init__(self, text: Sequence[int], vocab_size: int):
        self.text, self.vocab_size = text, vocab_size
        self.random = random.Random(0)

    def begin(self, prompt: Sequence[int], sampler: Sampler) -> "KnowingGuesses":
        """Guesses after the prompt."""
        return KnowingGuesses(self)


class KnowingGuesses:
    """The guesses of the text."""

    def __init__(self, source: KnowingSource):
        self._source = source
        self._place = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Count the tokens so far."""
        self._place += len(token_ids)

    def kind(self) -> int:
        """All guesses are alike."""
        return 0

    def guess(self, count: int) -> tuple[int, ...]:
        """The next tokens, some of them wrong."""
        source = self._source
        right = source.text[self._place : self._place + count]
        return tuple(
            token_id if source.random.random() < CHANCE else (token_id + 1) % source.vocab_size for token_id in right
        )

    def close(self) -> None:
        """Do nothing."""


def silence_attention(folder: Path) -> None:
    """Make the scales of every o_proj zero, in place."""
    for path in folder.glob("*.safetensors"):
        with path.open("r+b") as file:
            size = int.from_bytes(file.read(8), "little")
            for name, info in json.loads(file.read(size)).items():
                if name.endswith("o_proj.weight_scale"):
                    begin, end = info["data_offsets"]
                    file.seek(8 + size + begin)
                    file.write(bytes(end - begin))


def tell(runner: Runner, prompt: Sequence[int], count: int, source: DraftSource | None) -> tuple[list[int], float]:
    """A text after a prompt, and the seconds from its first token to its last."""
    drafting = None if source is None else Drafting(source)
    scheduler = Scheduler(runner, NoText(runner.config.vocab_size), drafting=drafting)
    scheduler.submit(Request(tuple(prompt), SAMPLER, (0,), count))
    said: list[int] = []
    start = 0.0
    while not scheduler.is_idle:
        said += [event.token_id for event in scheduler.step() if isinstance(event, Token)]
        start = start or (time.perf_counter() if said else 0.0)
    return said, time.perf_counter() - start


def compare(runner: Runner, name: str, prompt: Sequence[int], text: Sequence[int], source: DraftSource) -> None:
    """Print how much faster a text comes with drafts than without."""
    ratios, is_same = [], True
    for number in range(ROUNDS):
        seconds = {}
        for has_drafts in (True, False) if number % 2 else (False, True):
            said, seconds[has_drafts] = tell(runner, prompt, len(text), source if has_drafts else None)
            is_same = is_same and said == list(text)
        ratios.append(seconds[False] / seconds[True])
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    same = "texts equal" if is_same else "TEXTS DIFFER"
    print(f"{name}: {statistics.median(ratios):.3f} times the speed ({spread}), {same}", flush=True)


def main() -> None:
    """Print all figures of a shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", default="Llama-2-7B")
    parser.add_argument("--tokens", type=int, default=600, help="of a text")
    parser.add_argument("--depth", type=int, nargs="*", default=[128, 32000], help="tokens before the steps")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write_shape(options.shape, "int8", folder, lambda done, total: None)
        silence_attention(folder)
        prompt_len = options.tokens + 100
        runner = load(open_model(folder), max_seq_len=max(prompt_len + options.tokens, *options.depth) + 200)
    rng, vocab_size = random.Random(0), runner.config.vocab_size
    free = rng.choices(range(vocab_size), k=prompt_len)
    text, _ = tell(runner, free, options.tokens, None)
    quote = [
        *text[: options.tokens // 2],
        (text[options.tokens // 2] + 1) % vocab_size,
        *text[options.tokens // 2 + 1 :],
    ]
    quoting = [*quote, *free[len(quote) :]]
    print(f"{options.shape} int8, texts of {options.tokens} tokens behind {prompt_len}")
    compare(runner, f"right with chance {CHANCE}", free, text, KnowingSource(text, vocab_size))
    compare(runner, "quote, n-grams", quoting, text, NgramSource())
    compare(runner, "free, n-grams", free, text, NgramSource())
    for depth in options.depth:
        steps = measure_draft_steps(runner, rng.choices(range(vocab_size), k=depth), 7, 64, ROUNDS)
        shown = ", ".join(f"{1 + one.num_drafts} {one.steps_of_one:.2f}" for one in steps)
        print(f"behind {depth} tokens, steps of N tokens over one of {1e6 * steps[0].plain_seconds:.0f} us: {shown}")


if __name__ == "__main__":
    main()
