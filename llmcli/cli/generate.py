"""`llmcli generate`: continue a prompt, or answer one with the model's chat template."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from llmcli.cli import lazy
from llmcli.cli.command import argument
from llmcli.cli.constrained_texts import CompletenessNotice, SchemaOptions, Schemas
from llmcli.cli.options import (
    MessageOptions,
    RunOptions,
    SamplerOptions,
    SamplingNumbers,
    StoppingOptions,
    chat_template_option,
    prompt_option,
    sampling_option,
    system_option,
    template_var_option,
)
from llmcli.cli.output.base import CutNotice, Output, begin_text
from llmcli.cli.output.choice import OutputOptions, ReceiptOutput, open_outputs
from llmcli.cli.own_kernels import kernel_option, open_card, read_kernels, show_change
from llmcli.cli.progress import progress
from llmcli.cli.prompt import parse_template_variables, read_prompt, refuse_undecoded
from llmcli.cli.run import Run, check_run, open_run
from llmcli.cli.session import EncodedPrompt, Session
from llmcli.cli.terminal import terminal
from llmcli.engine.request import Event, Finished
from llmcli.errors import EXIT_INTERRUPTED, UsageError
from llmcli.timeline import IMPORTS, Timeline

if TYPE_CHECKING:
    from llmcli.engine.request import Request
    from llmcli.engine.roads import Road, Roads
    from llmcli.engine.scheduler import Generation
    from llmcli.lab.own_kernel import OwnKernel
    from llmcli.receipt.receipt import PromptFacts
    from llmcli.runners.base import Runner
    from llmcli.sampling.inspect import Inspection
    from llmcli.sampling.params import Sampler
    from llmcli.tokenizer.base import Tokenizer

_START_TIME = 19  # the field `starttime` of /proc/self/stat, counted after the command's name


def process_age() -> float:
    """Seconds since this process was started.

    On Linux, to a hundredth of a second. Elsewhere the process's computing time, which is nearly all of its start.
    """
    computing = time.process_time()
    try:
        # The name, in parentheses, may hold anything.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started, computing)
    except (OSError, AttributeError, ValueError, IndexError):
        return computing


@dataclass
class RoadFinder:
    """Finds the `count` likeliest roads of a request's texts. Ctrl-C ends the search; `is_complete` is then false."""

    runner: Runner
    tokenizer: Tokenizer
    request: Request
    count: int
    is_complete: bool = True

    def __call__(self, texts: Mapping[int, Sequence[Inspection]]) -> Sequence[Road]:
        """Follow the roads that leave these texts, given by the choices of each sample."""
        if not self.count:
            return ()
        roads: Roads | None = None
        try:
            forks = lazy.find_forks(texts, self.count)
            roads = lazy.Roads(self.runner, self.tokenizer, self.request, texts, forks)
            with progress("following roads", unit="tokens") as on_progress:
                for _ in roads.steps():
                    on_progress(roads.num_tokens, roads.most_tokens)
        except KeyboardInterrupt:
            self.is_complete = False
        found = [] if roads is None else roads.found()
        if not self.is_complete:
            terminal.info(f"interrupted; roads on the page: {len(found)} of {self.count}")
        elif len(found) < self.count:
            terminal.info(f"roads: {len(found)}, as no other token could have been drawn")
        return found


@dataclass(frozen=True)
class KernelRunOptions(RunOptions):
    """The model that runs, with the user's kernels if any."""

    kernel: list[str] | None = kernel_option()


@dataclass(frozen=True)
class PromptOptions:
    """Where the prompt comes from, and whether it is a message to answer.

    Raises: UsageError for flags that belong to --chat without it.
    """

    prompt: str | None = argument(None, "Text to continue; without it, or with `-`, read standard input.")
    file: Path | None = prompt_option(None, "Read the prompt from a file.", "-f")
    chat: bool = prompt_option(False, "Answer the prompt: apply the model's chat template.")
    system: str | None = system_option()
    chat_template: str | None = chat_template_option()
    template_var: list[str] | None = template_var_option()
    show_prompt: bool = prompt_option(False, "Show the prompt's text and token ids.", hidden=True)

    def __post_init__(self) -> None:
        refuse_undecoded(self.system, "--system")
        if not self.chat and (self.system is not None or self.chat_template is not None or self.template_var):
            raise UsageError("--system, --chat-template and --template-var need --chat")
        parse_template_variables(self.template_var)

    def facts(self, text: str, encoded: EncodedPrompt) -> PromptFacts:
        """The prompt for a receipt."""
        return lazy.PromptFacts(text, self.chat, self.system, self.chat_template, encoded.token_ids)

    def encode(self, session: Session, text: str) -> EncodedPrompt:
        """The prompt in the model's tokens, shown if requested. Raises: UsageError, TokenizerError"""
        if self.chat:
            variables = parse_template_variables(self.template_var)
            encoded = session.encode_message(text, self.system, self.chat_template, variables)
        else:
            encoded = session.encode_prompt(text)
        if self.show_prompt:
            terminal.show(f"{encoded.text}\n{' '.join(map(str, encoded.token_ids))}\n")
        return encoded


@dataclass(frozen=True)
class SampleOptions:
    """Which continuations are drawn. Raises: UsageError for one that does not exist"""

    num_samples: int = sampling_option(1, "Number of samples.", "-n", "--num-samples", min=1, max=10_000, metavar="K")
    only: int | None = sampling_option(
        None, "Generate only sample K of -n; its text stays the same.", min=1, max=2**32, metavar="K", hidden=True
    )

    def __post_init__(self) -> None:
        if self.only is not None and 1 < self.num_samples < self.only:
            raise UsageError(f"--only is {self.only}, expected 1 to {self.num_samples} (-n {self.num_samples})")

    @property
    def indices(self) -> tuple[int, ...]:
        """Indices from 0 of the samples to draw; on the command line they are numbered from 1."""
        return tuple(range(self.num_samples)) if self.only is None else (self.only - 1,)


@dataclass(frozen=True)
class TextOptions:
    """Which texts are written: the samples, and their schema."""

    samples: SampleOptions = SampleOptions()
    schema: SchemaOptions = SchemaOptions()


def generate(
    *,
    prompt: PromptOptions,
    options: KernelRunOptions,
    stopping: StoppingOptions,
    numbers: SamplingNumbers,
    texts: TextOptions,
    sampler: SamplerOptions,
    output: OutputOptions,
    messages: MessageOptions,
) -> None:
    """Continue a prompt, or answer one with --chat.

    Examples:

    llmcli generate "Once upon a time"

    llmcli generate --file chapter.txt -m my-model --seed 1
    """
    timeline = Timeline(process_age() if output.stats == "start" else 0.0)
    timeline.since(IMPORTS, 0.0)
    samples = texts.samples
    request = check_run(options, numbers, sampler, stopping.stop, ignore_eos=stopping.ignore_eos, timeline=timeline)
    grammar = texts.schema.read(ignore_eos=stopping.ignore_eos)  # while the card starts
    kernels = read_kernels(options.kernel, request.devices)
    text = read_prompt(prompt.prompt, prompt.file)
    run = open_run(request, options.model, timeline, holds_texts=grammar is not None)
    session = run.session
    with timeline.part("tokenizer"):
        encoded = prompt.encode(session, text)
    can_end = not stopping.ignore_eos and session.can_end(encoded)
    num_prompt_tokens = len(encoded.token_ids)
    max_new_tokens = session.limit_new_tokens(stopping.max_new_tokens, num_prompt_tokens, run.context, can_end=can_end)
    chosen_sampler = run.sampler(encoded)
    schemas = Schemas(session)
    schemas.prepare(grammar, chosen_sampler)
    num_roads = output.roads or 0
    num_rows = max(len(samples.indices), num_roads)
    run = _with_own_kernels(run, kernels, num_rows, timeline)
    receipt = _open_receipt(output, run, prompt.facts(text, encoded))  # before the weights are read
    loaded = run.load(num_rows, timeline)
    facts = run.facts(loaded, text, encoded, samples.indices, output.stats, timeline)
    cut_at = max_new_tokens if stopping.max_new_tokens is None else None
    cut_notice = CutNotice(cut_at, run.context, session.model.config.max_position_embeddings)
    wanted = schemas.hold(_request(run, encoded, chosen_sampler, samples, output, max_new_tokens), grammar)
    roads = RoadFinder(loaded.runner, session.tokenizer, wanted, num_roads)
    completeness = CompletenessNotice()
    outputs = [*open_outputs(output, facts, roads), cut_notice, completeness]
    if receipt is not None:
        outputs.append(receipt.begin(loaded.runner, wanted))
    generation = session.generation(loaded.runner, wanted, loaded.drafting)
    if output.shows_text:
        begin_text(facts, samples.indices[0])
    if not show_all(generation, outputs) or not roads.is_complete:
        raise typer.Exit(EXIT_INTERRUPTED)
    if texts.schema.require_complete:
        completeness.require_complete()
    if kernels:
        show_change(run.devices, loaded.runner, num_prompt_tokens)


def _open_receipt(output: OutputOptions, run: Run, prompt: PromptFacts) -> ReceiptOutput | None:
    """The requested receipt, if any. Raises: UsageError for an existing file, OSError"""
    if output.receipt is None:
        return None
    return ReceiptOutput(output.receipt, run, prompt, replace=output.force)


def _request(
    run: Run,
    encoded: EncodedPrompt,
    sampler: Sampler,
    samples: SampleOptions,
    output: OutputOptions,
    max_new_tokens: int | None,
) -> Request:
    return run.session.request(
        encoded,
        sampler,
        samples=samples.indices,
        max_new_tokens=max_new_tokens,
        stop_strings=run.stop_strings,
        num_alternatives=output.num_alternatives,
        keeps_pages=bool(output.roads),
    )


def _with_own_kernels(run: Run, kernels: Sequence[OwnKernel], num_rows: int, timeline: Timeline) -> Run:
    """The run on a card that launches the user's kernels, once they pass their checks.

    Raises: LLMCliError and its subclasses
    """
    if not kernels:
        return run
    with timeline.part("checks of kernels"):
        return replace(run, devices=open_card(run.devices, kernels, run.session.model, run.context, num_rows))


def show_all(generation: Generation, outputs: Sequence[Output]) -> bool:
    """Pass every event and the end to the outputs; False if Ctrl-C stopped the generation."""
    finished: list[Finished] = []

    def take(event: Event) -> None:
        if isinstance(event, Finished):
            finished.append(event)
        for output in outputs:
            output.show(event)

    is_complete = True
    try:
        for event in generation.events():
            take(event)
    except KeyboardInterrupt:
        is_complete = False
        for event in generation.interrupt():
            take(event)
    finished.sort(key=lambda item: item.sample)
    for output in outputs:
        output.finish(finished)
    return is_complete
