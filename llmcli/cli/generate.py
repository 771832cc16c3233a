"""`llmcli generate`: continue a prompt, or answer one with the model's chat template; which outputs flags ask for."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from llmcli.cli import lazy, shared
from llmcli.cli.command import argument
from llmcli.cli.constrained_texts import CompletenessNotice, SchemaOptions, Schemas
from llmcli.cli.output import base
from llmcli.cli.output.page import FindRoads, HtmlOutput
from llmcli.cli.output.page_kit import PAGE
from llmcli.cli.output.tokens import ColorOutput, WhyOutput, why_no_color
from llmcli.cli.own_kernels import kernel_option, open_card, read_kernels, show_change
from llmcli.cli.progress import progress
from llmcli.cli.prompt import parse_template_variables, read_prompt, refuse_undecoded
from llmcli.cli.run import Run, check_run, open_run
from llmcli.cli.session import EncodedPrompt, Session
from llmcli.cli.terminal import terminal
from llmcli.engine.request import Event, Finished
from llmcli.errors import EXIT_INTERRUPTED, UsageError
from llmcli.timeline import IMPORTS, Timeline

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

    runner: lazy.runners.Runner
    tokenizer: lazy.tokenizer.Tokenizer
    request: lazy.request.Request
    count: int
    is_complete: bool = True

    def __call__(self, texts: Mapping[int, Sequence[lazy.inspect.Inspection]]) -> Sequence[lazy.roads.Road]:
        """Follow the roads that leave these texts, given by the choices of each sample."""
        if not self.count:
            return ()
        roads: lazy.roads.Roads | None = None
        try:
            forks = lazy.roads.find_forks(texts, self.count)
            roads = lazy.roads.Roads(self.runner, self.tokenizer, self.request, texts, forks)
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
class KernelRunOptions(shared.RunOptions):
    """The model that runs, with the user's kernels if any."""

    kernel: list[str] | None = kernel_option()


@dataclass(frozen=True)
class PromptOptions:
    """Where the prompt comes from, and whether it is a message to answer.

    Raises: UsageError for flags that belong to --chat without it.
    """

    prompt: str | None = argument(None, "Text to continue; without it, or with `-`, read standard input.")
    file: Path | None = shared.prompt_option(None, "Read the prompt from a file.", "-f")
    chat: bool = shared.prompt_option(False, "Answer the prompt: apply the model's chat template.")
    system: str | None = shared.system_option()
    chat_template: str | None = shared.chat_template_option()
    template_var: list[str] | None = shared.template_var_option()
    show_prompt: bool = shared.prompt_option(False, "Show the prompt's text and token ids.", hidden=True)

    def __post_init__(self) -> None:
        refuse_undecoded(self.system, "--system")
        if not self.chat and (self.system is not None or self.chat_template is not None or self.template_var):
            raise UsageError("--system, --chat-template and --template-var need --chat")
        parse_template_variables(self.template_var)

    def facts(self, text: str, encoded: EncodedPrompt) -> lazy.receipt.PromptFacts:
        """The prompt for a receipt."""
        return lazy.receipt.PromptFacts(text, self.chat, self.system, self.chat_template, encoded.token_ids)

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

    num_samples: int = shared.sampling_option(
        1, "Number of samples.", "-n", "--num-samples", min=1, max=10_000, metavar="K"
    )
    only: int | None = shared.sampling_option(
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


# Tokens listed for each choice: as many as fit on a terminal's line, and on the page.
WHY_ALTERNATIVES = 5
HTML_ALTERNATIVES = 10


class ReceiptOutput(base.Output):
    """Notes the state of the model's files when made, hashes them while the text comes, and writes at the end.

    Raises: CheckpointError for a file that is gone.
    """

    def __init__(self, path: Path, run: Run, prompt: lazy.receipt.PromptFacts, *, replace: bool):
        self._path = path
        self._replace = replace
        self._run = run
        self._prompt = prompt
        self._digests = lazy.describe.look_at_files(run.session.model, prompt)

    def begin(self, runner: lazy.runners.Runner, request: lazy.request.Request) -> ReceiptOutput:
        """Start hashing the weights, which are read by now, so that it does not delay the first token."""
        self._runner, self._request = runner, request
        self._digests.start()
        return self

    def finish(self, finished: list[Finished]) -> None:
        """Write the receipt of a finished run.

        Raises: CheckpointError if a file of the model has changed; OutputError, UsageError if it cannot be written.
        """
        if len(finished) < len(self._request.samples) or any(item.finish_reason == "interrupted" for item in finished):
            self._digests.stop()
            terminal.info("no receipt: the run was interrupted")
            return
        run = self._run
        with progress(f"hashing {run.session.name}") as on_progress:
            files = self._digests.wait(on_progress)
        receipt = lazy.describe.describe_run(
            run.model,
            run.session.model,
            self._runner,
            run.devices.card,
            self._prompt,
            self._request,
            files,
            lazy.describe.describe_samples(finished),
        )
        lazy.receipt.save_receipt(self._path, receipt, replace=self._replace)
        terminal.info(f"receipt: {self._path}")


@dataclass(frozen=True)
class OutputOptions:
    """The output flags, checked against each other.

    Raises: UsageError for flags that exclude each other, or a page that cannot be written.
    """

    json: bool = shared.output_option(False, "Print one JSON object instead of text.")
    jsonl: bool = shared.output_option(False, "Print one JSON object for each token.", hidden=True)
    logprobs: int | None = shared.output_option(
        None,
        "With --json or --jsonl: add the log-probability of each token and of the K likeliest.",
        min=0,
        max=100,
        metavar="K",
        hidden=True,
    )
    color: str | None = shared.output_option(
        None, "Color each token by its probability.", metavar="prob", words=("prob",)
    )
    why: bool = shared.output_option(False, "Show what each sampling step removed, for each token.")
    html: Path | None = shared.output_option(None, "Save probabilities and sampling steps as an HTML page.")
    receipt: Path | None = shared.output_option(None, "Save all that the text depends on, for `llmcli replay`.")
    force: bool = shared.output_option(False, "Replace an older page of --html or receipt of --receipt.", hidden=True)
    roads: int | None = shared.output_option(
        None, "Show on the --html page where the N likeliest tokens that were not drawn would have led.", min=1, max=100
    )
    stats: str | None = shared.output_option(
        None,
        "Print times, rates and settings; with start: how long each part of the start took.",
        metavar="[start]",
        words=("start",),
    )

    def __post_init__(self) -> None:
        """Refuse what cannot be shown together."""
        if self.json and self.jsonl:
            raise UsageError("--json and --jsonl cannot be combined")
        if self.logprobs is not None and self.shows_text:
            raise UsageError("--logprobs needs --json or --jsonl; --why and --html FILE show probabilities too")
        if self.color not in (None, "prob"):
            raise UsageError(f"--color is {self.color!r}, expected prob")
        if self.color is not None and not self.shows_text:
            raise UsageError("--color cannot be combined with --json or --jsonl")
        if self.stats not in (None, "run", "start"):
            raise UsageError(f"--stats is {self.stats!r}, expected no value, or start")
        if self.force and self.html is None and self.receipt is None:
            raise UsageError("--force needs --html FILE or --receipt FILE")
        if self.roads is not None and self.html is None:
            raise UsageError("--roads needs --html FILE")
        # Before minutes of work.
        if self.html is not None:
            PAGE.check(self.html, replace=self.force)
        if self.receipt is not None:
            if self.html is not None and self.receipt.absolute() == self.html.absolute():
                raise UsageError(f"--html and --receipt are both {self.receipt}; name two files")
            lazy.receipt.RECEIPT_FILE.check(self.receipt, replace=self.force)

    @property
    def shows_text(self) -> bool:
        """Whether the text itself goes to stdout."""
        return not (self.json or self.jsonl)

    @property
    def num_alternatives(self) -> int | None:
        """How many other tokens the engine has to report for each choice, or None if no output shows them."""
        wanted = [self.logprobs] if self.logprobs is not None else []
        wanted += [WHY_ALTERNATIVES] if self.why else []
        wanted += [HTML_ALTERNATIVES] if self.html is not None else []
        wanted += [0] if self.color else []
        return max(wanted, default=None)


def open_outputs(
    options: OutputOptions, facts: base.RunFacts, find_roads: FindRoads = lambda texts: ()
) -> list[base.Output]:
    """The outputs the flags ask for: those for stdout first; the page last, since its roads take a while.

    Raises: UsageError if the page of --html cannot be written.
    """
    outputs: list[base.Output] = [_main_output(options, facts)]
    if options.why:
        outputs.append(WhyOutput(facts))
    if options.stats == "run":
        outputs.append(base.StatsOutput(facts))
    if facts.timeline is not None:
        outputs.append(base.StartOutput(facts.timeline))
    if options.html is not None:
        outputs.append(HtmlOutput(facts, options.html, replace=options.force, find_roads=find_roads))
    return outputs


def _main_output(options: OutputOptions, facts: base.RunFacts) -> base.Output:
    if options.json:
        return base.JsonOutput(facts, with_logprobs=options.logprobs is not None)
    if options.jsonl:
        return base.JsonLinesOutput(facts)
    if options.color and (reason := why_no_color()):
        terminal.info(reason)
    elif options.color:
        return ColorOutput(facts)
    return base.TextOutput(facts)


def generate(
    *,
    prompt: PromptOptions,
    options: KernelRunOptions,
    stopping: shared.StoppingOptions,
    numbers: shared.SamplingNumbers,
    texts: TextOptions,
    sampler: shared.SamplerOptions,
    output: OutputOptions,
    messages: shared.MessageOptions,
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
    run = open_run(request, shared.model_or_default(options.model), timeline, holds_texts=grammar is not None)
    session = run.session
    with timeline.part("tokenizer"):
        encoded = prompt.encode(session, text)
    max_new_tokens = run.limit_new_tokens(stopping.max_new_tokens, encoded)
    chosen_sampler = run.sampler(encoded)
    schemas = Schemas(session)
    schemas.prepare(grammar, chosen_sampler)
    num_roads = output.roads or 0
    num_rows = max(len(samples.indices), num_roads)
    run = _with_own_kernels(run, kernels, num_rows, timeline)
    receipt = None
    if output.receipt is not None:  # before the weights are read
        receipt = ReceiptOutput(output.receipt, run, prompt.facts(text, encoded), replace=output.force)
    loaded = run.load(num_rows, timeline)
    facts = run.facts(loaded, text, encoded, samples.indices, output.stats, timeline)
    cut_at = max_new_tokens if stopping.max_new_tokens is None else None
    cut_notice = base.CutNotice(cut_at, run.context, session.model.config.max_position_embeddings)
    wanted = schemas.hold(_request(run, encoded, chosen_sampler, samples, output, max_new_tokens), grammar)
    roads = RoadFinder(loaded.runner, session.tokenizer, wanted, num_roads)
    outputs = [*open_outputs(output, facts, roads), cut_notice, completeness := CompletenessNotice()]
    if receipt is not None:
        outputs.append(receipt.begin(loaded.runner, wanted))
    generation = lazy.scheduler.Generation(loaded.runner, session.tokenizer, wanted, loaded.drafting)
    if output.shows_text:
        base.begin_text(facts, samples.indices[0])
    if not show_all(generation, outputs) or not roads.is_complete:
        raise typer.Exit(EXIT_INTERRUPTED)
    if texts.schema.require_complete:
        completeness.require_complete()
    if kernels:
        show_change(run.devices, loaded.runner, len(encoded.token_ids))


def _request(
    run: Run,
    encoded: EncodedPrompt,
    sampler: lazy.params.Sampler,
    samples: SampleOptions,
    output: OutputOptions,
    max_new_tokens: int | None,
) -> lazy.request.Request:
    return run.session.request(
        encoded,
        sampler,
        samples=samples.indices,
        max_new_tokens=max_new_tokens,
        stop_strings=run.stop_strings,
        num_alternatives=output.num_alternatives,
        keeps_pages=bool(output.roads),
    )


def _with_own_kernels(run: Run, kernels: Sequence[lazy.own_kernel.OwnKernel], num_rows: int, timeline: Timeline) -> Run:
    """The run on a card that launches the user's kernels, once they pass. Raises: LLMCliError and its subclasses"""
    if not kernels:
        return run
    with timeline.part("checks of kernels"):
        return replace(run, devices=open_card(run.devices, kernels, run.session.model, run.context, num_rows))


def show_all(generation: lazy.scheduler.Generation, outputs: Sequence[base.Output]) -> bool:
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
