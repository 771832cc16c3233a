"""The server beside `batch`: as many texts through both, in turns in one process, and the time to a first token.

    python -m scripts.benchmark_serve [MODEL] [--clients N] [--texts N] [--prompt N] [--tokens N] [--rounds N]
    python -m scripts.benchmark_serve --shape Llama-3.2-1B --tokenizer FILE [--format int8] [--scratch FOLDER] ...

Clients run in processes of their own and stream over HTTP; each sends its next request when an answer has ended. There
are as many rows as clients. Prompts are random tokens and differ each time, so that no pages are shared. A text has
half to one and a half times --tokens. `batch` is that command's loop over a scheduler. The first texts of the server
are compared with what `batch` makes of the same requests.

In life clients run elsewhere. So here they have one half of the processor's cores to themselves, and the server and
`batch` the other half. Fewer than four cores are shared by all.

The floor of the first tokens is the time in which a scheduler runs a prompt for each client with one new token each;
"scheduler" are the first tokens of texts that are submitted to it together, "server" those of clients that come
together.

With --shape weights are random. A shape has no tokenizer: FILE is a tokenizer.json for it, also packed with xz.

With --step-ms a device without a model runs, whose steps take so long: what the host takes can be measured without a
card. Of each run the processor time is told: of the thread that runs the rows for a token, of the front for a piece.
"""

import argparse
import json
import lzma
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from llmcli.batch.run import Progress, run_batch
from llmcli.checkpoint.random_weights import write_shape
from llmcli.cli.constrained_texts import Schemas
from llmcli.cli.run import LoadedRunner, check_run, loaded_objects_set_aside, open_run
from llmcli.cli.serve import ServeOptions, open_served_model
from llmcli.cli.shared import RunOptions, SamplerOptions
from llmcli.engine.remote.worker import Hold
from llmcli.engine.request import Event, Failed, Finished, Request, Token
from llmcli.engine.scheduler import Scheduler
from llmcli.runners.stepping import SteppingRunner
from llmcli.serve.bodies import CompletionBody
from llmcli.serve.front import FrontWork, ServerOptions
from llmcli.serve.server import Server
from llmcli.serve.service import ClientLimits, ServedModel
from scripts.core_halves import core_halves
from scripts.steady_device import SteadyDevice

CLIENTS_PER_PROCESS = 32
NUM_CHECKED = 8
WARM_UP_TOKENS = 8
Body = dict[str, Any]


class TimedScheduler(Scheduler):
    """A scheduler that notes the processor time of its thread, from the first step to the end of the latest one.

    What the thread does with the events of a step counts, but for the latest.
    """

    processor_seconds = 0.0
    _first_seconds: float | None = None

    def step(self) -> list[Event]:
        """Run one step."""
        if self._first_seconds is None:
            self._first_seconds = time.thread_time()
        events = super().step()
        self.processor_seconds = time.thread_time() - self._first_seconds
        return events


@dataclass
class Bench:
    """A model ready to run, and the size of the work."""

    model: ServedModel
    open_model: Callable[[], ServedModel]
    loaded: LoadedRunner
    num_clients: int
    num_prompt_tokens: int
    hold: Hold
    client_cores: set[int]
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def bodies(self, count: int, num_tokens: int) -> list[Body]:
        """Requests for `num_tokens` on average, whose prompts nothing has run before."""
        vocab = range(self.loaded.runner.config.vocab_size)
        return [
            {
                "prompt": self.rng.choices(vocab, k=self.num_prompt_tokens),
                "max_tokens": self.rng.randint((num_tokens + 1) // 2, 3 * num_tokens // 2),
                "seed": self.rng.randrange(2**32),
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            for _ in range(count)
        ]

    def scheduler(self) -> TimedScheduler:
        """A scheduler as in the commands."""
        return TimedScheduler(self.loaded.runner, self.model.tokenizer, drafting=self.loaded.drafting)

    def request(self, body: Body) -> Request:
        """A request as in the server."""
        parsed = CompletionBody.model_validate(body)
        (prompt,) = parsed.prompts
        return self.model.completion(parsed, prompt)

    def batch(self, bodies: Sequence[Body]) -> "BatchRun":
        """Run requests as in `batch`."""
        texts, progress, scheduler = [""] * len(bodies), Progress(), self.scheduler()

        def take(index: int, event: Finished | Failed) -> None:
            if isinstance(event, Failed):
                raise event.error
            texts[index] = event.text

        begin = time.perf_counter()
        run_batch(scheduler, range(len(bodies)), lambda index: self.request(bodies[index]), take, progress)
        rate = progress.num_tokens / (time.perf_counter() - begin)
        return BatchRun(rate, scheduler.processor_seconds / progress.num_tokens, texts)

    def first_tokens(self, num_tokens: int) -> list[float]:
        """Seconds to the first token of each text, if one for each client is submitted at once."""
        seconds: dict[int, float] = {}
        scheduler = self.scheduler()
        requests = [self.request(body) for body in self.bodies(self.num_clients, num_tokens)]
        begin = time.perf_counter()
        for request in requests:
            scheduler.submit(request)
        while len(seconds) < self.num_clients:
            for event in scheduler.step():
                if isinstance(event, Token):
                    seconds.setdefault(event.request, time.perf_counter() - begin)
        scheduler.interrupt()
        return list(seconds.values())

    def serve(self, bodies: Sequence[Body]) -> "ServerRun":
        """Send requests to a server, from processes of their own."""
        listener, _ = ServeOptions(port=0).listen(has_key=False)
        port = listener.getsockname()[1]
        num_processes = -(-self.num_clients // CLIENTS_PER_PROCESS)
        shares = [list(bodies[index::num_processes]) for index in range(num_processes)]
        results: list[Any] = [None] * len(bodies)
        scheduler, front_seconds = self.scheduler(), 0.0

        def run_clients() -> None:
            nonlocal front_seconds
            try:
                begin = processor_seconds_of_front()
                for index, answers in enumerate(run_processes(port, shares, self.num_clients, self.client_cores)):
                    results[index::num_processes] = answers
                front_seconds = processor_seconds_of_front() - begin
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        clients = threading.Thread(target=run_clients)
        options = ServerOptions(max_waiting=len(bodies), limits=ClientLimits(2**23, None), grace_seconds=1.0)
        with Server(listener, FrontWork(self.open_model, options)) as server:
            server.run(
                scheduler,
                self.hold,
                log=lambda line: None,
                log_contents=lambda what, contents: None,
                on_ready=clients.start,
            )
        clients.join()
        if None in results:
            raise SystemExit("a client has failed")
        return ServerRun(results, scheduler.processor_seconds, front_seconds)


@dataclass(frozen=True)
class BatchRun:
    """New tokens a second, processor seconds of a token, and the texts."""

    rate: float
    token_seconds: float
    texts: Sequence[str]


@dataclass(frozen=True)
class ServerRun:
    """The clients' notes on each request, in their order; processor seconds of the worker and of the front."""

    results: Sequence[Any]
    worker_seconds: float
    front_seconds: float

    @property
    def num_tokens(self) -> int:
        """New tokens of all texts."""
        return sum(result["pieces"][-1]["usage"]["completion_tokens"] for result in self.results)

    @property
    def num_pieces(self) -> int:
        """Pieces of all streams."""
        return sum(len(result["pieces"]) for result in self.results)

    @property
    def rate(self) -> float:
        """New tokens a second."""
        first, last = min(result["sent"] for result in self.results), max(result["end"] for result in self.results)
        return self.num_tokens / float(last - first)


def processor_seconds_of_front() -> float:
    """The processor seconds of the front's process, a child of this one."""
    (front,) = [one for one in psutil.Process().children() if "llmcli.serve.front" in " ".join(one.cmdline())]
    return time.clock_gettime(~front.pid << 3 | 2)  # as clock_getcpuclockid of the C library: to the nanosecond


def run_processes(port: int, shares: Sequence[Sequence[Body]], num_clients: int, cores: set[int]) -> list[list[Any]]:
    """Run the clients on these cores, and return the output of each of their processes."""
    command = [sys.executable, "-m", "scripts.serve_clients"]
    processes = []
    for index, share in enumerate(shares):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        os.sched_setaffinity(process.pid, cores)
        work = {"port": port, "clients": len(range(index, num_clients, len(shares))), "bodies": share}
        assert process.stdin is not None
        process.stdin.write(json.dumps(work) + "\n")
        process.stdin.flush()
        processes.append(process)
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    outputs: list[list[Any]] = [[] for _ in processes]

    def talk(index: int) -> None:
        output, _ = processes[index].communicate("go\n")
        outputs[index] = json.loads(output)

    threads = [threading.Thread(target=talk, args=(index,)) for index in range(len(processes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outputs


def text_of(result: Any) -> str:
    """The whole text of a stream."""
    return "".join(choice["text"] for piece in result["pieces"] for choice in piece["choices"])


def summary(values: Sequence[float]) -> str:
    """Median and 99th percentile in milliseconds."""
    ordered = sorted(1e3 * value for value in values)
    return f"p50 {statistics.median(ordered):.0f} ms, p99 {ordered[int(0.99 * (len(ordered) - 1))]:.0f} ms"


def measure(bench: Bench, num_texts: int, num_tokens: int, num_rounds: int) -> None:
    """Run both in turns, and print."""
    print(f"{bench.loaded.runner.description}; {bench.num_clients} clients and rows, {num_texts} texts, prompts of "
          f"{bench.num_prompt_tokens}, {num_tokens} new tokens on average; {len(os.sched_getaffinity(0))} logical "
          f"processors, and {len(bench.client_cores)} for clients")  # fmt: skip
    bench.batch(bench.bodies(2 * bench.num_clients, WARM_UP_TOKENS))
    begin = time.perf_counter()
    bench.batch([{**body, "max_tokens": 1} for body in bench.bodies(bench.num_clients, 1)])
    floor = time.perf_counter() - begin
    rates: dict[str, list[float]] = {"batch": [], "server": []}
    for index in range(num_rounds):
        batch = bench.batch(bench.bodies(num_texts, num_tokens))
        bodies = bench.bodies(num_texts, num_tokens)
        server = bench.serve(bodies)
        rates["batch"].append(batch.rate)
        rates["server"].append(server.rate)
        if index == 0:
            print(f"first token: floor for all {1e3 * floor:.0f} ms", end="; ")
            print(f"scheduler {summary(bench.first_tokens(num_tokens))}", end="; ")
            first = sorted(server.results, key=lambda result: float(result["sent"]))[: bench.num_clients]
            print(f"server {summary([result['first'] - result['sent'] for result in first])}")
            texts = bench.batch(bodies[:NUM_CHECKED]).texts
            same = sum(text == text_of(result) for text, result in zip(texts, server.results, strict=False))
            print(f"{same} of {NUM_CHECKED} texts are those of batch")
        print(f"tokens/s: batch {batch.rate:,.0f}, server {server.rate:,.0f}", end="; processor time: ")
        print(f"batch {1e6 * batch.token_seconds:.1f} us a token", end=", ")
        print(f"server {1e6 * server.worker_seconds / server.num_tokens:.1f}", end=", ")
        print(f"front {1e6 * server.front_seconds / server.num_pieces:.1f} us a piece", end=", ")
        print(f"{server.num_pieces / server.num_tokens:.2f} pieces a token", flush=True)
    ratio = statistics.median(rates["server"]) / statistics.median(rates["batch"])
    print(f"by medians the server has {100 * ratio:.1f} % of the rate of batch")


def write_model(shape: str, form: str, tokenizer: Path, parent: Path) -> Path:
    """The folder of a shape with random weights and a tokenizer; an existing one is used as it is."""
    folder = parent / f"{shape}-{form}-with-tokenizer"
    if not folder.exists():
        parent.mkdir(parents=True, exist_ok=True)
        write_shape(shape, form, folder, lambda done, total: None)
        content = tokenizer.read_bytes()
        (folder / "tokenizer.json").write_bytes(lzma.decompress(content) if tokenizer.suffix == ".xz" else content)
    return folder


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--shape")
    parser.add_argument("--format", default="int8")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--texts", type=int, help="default: three for each client")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--step-ms", type=float)
    options = parser.parse_args()
    if options.shape is not None and options.tokenizer is None:
        parser.error("--shape needs --tokenizer")
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model
        if options.shape is not None:
            parent = options.scratch or Path(scratch)
            model = str(write_model(options.shape, options.format, options.tokenizer, parent))
        context = options.prompt + 2 * options.tokens
        cores, client_cores = core_halves(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores)
        request = check_run(RunOptions(context=context, draft=options.draft), {}, SamplerOptions(), None)
        run, open_model = open_run(request, model), partial(open_served_model, request, model, None, None, None)
        if options.step_ms is None:
            loaded = run.load(options.clients, host_rows=options.clients)
        else:
            device = SteadyDevice(
                run.session.model.config,
                num_rows=options.clients,
                max_seq_len=context,
                step_seconds=options.step_ms / 1e3,
            )
            loaded = LoadedRunner(SteppingRunner(device), 0.0)
        bench = Bench(
            open_model(),
            open_model,
            loaded,
            options.clients,
            options.prompt,
            Schemas(run.session).hold,
            client_cores,
        )
        with loaded_objects_set_aside():
            measure(bench, options.texts or 3 * options.clients, options.tokens, options.rounds)


if __name__ == "__main__":
    main()
