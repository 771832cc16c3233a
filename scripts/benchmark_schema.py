"""What it costs to hold texts to a schema: steps of decoding without and with, and the time of a mask.

    python -m scripts.benchmark_schema MODEL|SHAPE [--tokenizer FOLDER] [--rows N...] [--steps N] [--device cpu]

Each row has a schema of its own, an object of 20 fields. Steps without and with are timed in turns; those around the
beginning and the end of a text do not count. A shape has random weights, and needs the tokenizer of its vocabulary.
Times are of a clock on the wall; on the CPU they are the processor's, of all threads.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from llmcli.checkpoint.model import open_model
from llmcli.checkpoint.random_weights import write_shape
from llmcli.cli.run import loaded_objects_set_aside
from llmcli.engine.request import Finished, Request, Token
from llmcli.engine.scheduler import Scheduler
from llmcli.runners.base import Runner
from llmcli.sampling.candidates import unpack_mask
from llmcli.sampling.params import Sampler, SamplingParams
from llmcli.schema.grammar import json_schema_grammar
from llmcli.schema.schema import Schema, Vocabulary
from llmcli.tokenizer.base import Tokenizer
from llmcli.tokenizer.load import load_tokenizer

MAX_SEQ_LEN = 1024
PROMPT = (1, 2, 3)
ROUNDS = 3
STEPS_AWAY = 2
KINDS = (
    {"type": "string", "maxLength": 40},
    {"type": "integer", "minimum": 0, "maximum": 1_000_000},
    {"enum": ["red", "green", "blue"]},
    {"type": "boolean"},
    {"type": "number"},
)


def make_schema(vocabulary: Vocabulary, number: int) -> Schema:
    """An object of 20 fields; another number has other names."""
    fields = {f"field_{index}_{number}": KINDS[index % len(KINDS)] for index in range(20)}
    content = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return Schema(json_schema_grammar("schema", json.dumps(content)), vocabulary)


class Steps:
    """Decoding in many rows; an ended text is followed by another. Attributes: seconds: of steps"""

    def __init__(self, runner: Runner, tokenizer: Tokenizer, schemas: Sequence[Schema | None]):
        self.seconds: list[float] = []
        self._clock = time.perf_counter if runner.limits.works_ahead else time.process_time
        self._scheduler = Scheduler(runner, tokenizer)
        self._ends = schemas[0].vocabulary.eos_token_ids if schemas[0] else frozenset[int]()
        self._places: dict[int, int] = {}
        self._begun: set[int] = set()  # texts with a token
        self._quiet: list[float] = []  # times of the steps since a text last began or ended
        self._schemas = schemas
        self._count = 0
        for place in range(len(schemas)):
            self._submit(place)

    def _submit(self, place: int) -> None:
        self._count += 1
        sampler = Sampler(SamplingParams(), self._count, num_prompt_tokens=len(PROMPT), eos_token_ids=self._ends)
        request = Request(PROMPT, sampler, (0,), MAX_SEQ_LEN // 2, schema=self._schemas[place])
        self._places[self._scheduler.submit(request)] = place

    def run(self, count: int) -> None:
        """Run a number of steps in which each row gets a token and no text begins or ends.

        A card works ahead, so a call may wait for work of the next step: a prompt, or a graph's first use.
        """
        num_timed = len(self.seconds) + count
        while len(self.seconds) < num_timed:
            begin = self._clock()
            events = self._scheduler.step()
            self._quiet.append(self._clock() - begin)
            tokens = [event.request for event in events if isinstance(event, Token)]
            if not (len(tokens) == len(events) == len(self._schemas) and self._begun.issuperset(tokens)):
                self._quiet.clear()
            elif len(self._quiet) > 2 * STEPS_AWAY:
                self.seconds.append(self._quiet[-1 - STEPS_AWAY])
            self._begun.update(tokens)
            for event in events:
                if isinstance(event, Finished):
                    self._submit(self._places.pop(event.request))

    def stop(self) -> None:
        """End all rows."""
        for number in self._places:
            self._scheduler.cancel(number)


def measure_steps(runner: Runner, tokenizer: Tokenizer, vocabulary: Vocabulary, num_rows: int, count: int) -> None:
    """Print one row of the table."""
    schemas = [make_schema(vocabulary, number) for number in range(num_rows)]
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(ROUNDS):
        for is_held in seconds:
            steps = Steps(runner, tokenizer, schemas if is_held else [None] * num_rows)
            steps.run(10)
            steps.seconds.clear()
            steps.run(count // ROUNDS)
            steps.stop()
            seconds[is_held] += steps.seconds
    cells = []
    for average in (statistics.median, statistics.mean):
        free, held = (1e6 * average(of_kind) for of_kind in seconds.values())
        cells += [f"{free:>9.0f} {held:>9.0f} {held / free - 1:>+8.1%}"]
    print(f"{num_rows:>4} {'   '.join(cells)}", flush=True)


def measure_masks(vocabulary: Vocabulary, count: int) -> None:
    """Print the times of masks alone, for random tokens that follow a schema."""
    schema, seconds = make_schema(vocabulary, 0), list[float]()
    while len(seconds) < count:
        held = schema.begin(at_start=False)
        for token_id in random_text(schema, len(seconds)):
            begin = time.thread_time()
            held.mask()
            seconds.append(time.thread_time() - begin)
            held.push(token_id)
    ordered = sorted(1e6 * one for one in seconds)
    parts = ", ".join(f"{part:.0%} under {ordered[int(part * len(ordered))]:.0f}" for part in (0.5, 0.9, 0.99))
    print(f"a mask takes {statistics.mean(ordered):.0f} us, {parts}, the longest {ordered[-1]:.0f}", flush=True)


def random_text(schema: Schema, seed: int) -> list[int]:
    """Tokens that random logits choose among those that the schema allows."""
    generator, held, token_ids = np.random.default_rng(seed), schema.begin(at_start=False), list[int]()
    while not held.is_complete and len(token_ids) < MAX_SEQ_LEN:
        token_ids.append(int(generator.choice(np.flatnonzero(unpack_mask(held.mask())))))
        held.push(token_ids[-1])
    return token_ids


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model's folder, or a shape")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(options.model)
        if not folder.is_dir():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
            write_shape(options.model, "int8", folder, lambda done, total: None)
        if options.device == "cuda":
            from llmcli.runners.cuda.load.model import load
        else:
            from llmcli.runners.numpy.load import load  # type: ignore[assignment]
        model = open_model(folder)
        tokenizer = load_tokenizer(options.tokenizer or folder)
        begin = time.perf_counter()
        ends = tokenizer.eos_token_ids or {max(tokenizer.special_token_ids)}
        vocabulary = Vocabulary(tokenizer, ends, model.config.vocab_size)
        print(f"the vocabulary of {model.config.vocab_size} tokens takes {time.perf_counter() - begin:.2f} s")
        measure_masks(vocabulary, options.steps)
        runner = load(model, max_seq_len=MAX_SEQ_LEN, num_rows=max(options.rows))
        print(f"{runner.description}; us a step, without and with a schema: median, mean")
        with loaded_objects_set_aside():  # as in `batch` and `serve`
            for num_rows in options.rows:
                measure_steps(runner, tokenizer, vocabulary, num_rows, options.steps)


if __name__ == "__main__":
    main()
