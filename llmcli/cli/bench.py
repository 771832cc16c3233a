"""`llmcli bench`: how fast a model is on this machine, and how near that comes to what its memory allows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmcli.cli import lazy
from llmcli.cli.bench_report import as_csv, as_json, facts_text, tables_text
from llmcli.cli.command import with_groups
from llmcli.cli.device_choice import RunnerOptions, load_runner
from llmcli.cli.options import (
    OUTPUT_PANEL,
    ManyRowsDeviceOptions,
    MessageOptions,
    RowsOption,
    SubjectOptions,
    parse_rows,
)
from llmcli.cli.own_kernels import KernelOption, open_card, opened_card, read_kernels
from llmcli.cli.progress import progress
from llmcli.cli.targets import LENGTHS, open_subject, open_target, refuse_scratch_of_model, subject_files
from llmcli.cli.terminal import terminal
from llmcli.errors import UsageError

if TYPE_CHECKING:
    from llmcli.lab.own_kernel import OwnKernel
    from llmcli.measure.bench import BenchReport
    from llmcli.measure.subject import Subject

MEASURING_PANEL = "Measuring"
DEFAULT_NEW_TOKENS = 64
DEFAULT_REPEATS = 5


@dataclass(frozen=True)
class MeasuringOptions:
    """What is measured, and where a shape's weights lie meanwhile."""

    prompt: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Prompt length in tokens; repeatable.",
            show_default="128 and 2048, as far as the context limit allows",
            rich_help_panel=MEASURING_PANEL,
        ),
    ] = None
    depth: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Tokens in the KV cache when decoding begins; repeatable.",
            show_default="as --prompt",
            hidden=True,
            rich_help_panel=MEASURING_PANEL,
        ),
    ] = None
    tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="New tokens in each run.", rich_help_panel=MEASURING_PANEL)
    ] = DEFAULT_NEW_TOKENS
    repeats: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Runs per figure; long ones are repeated less.", rich_help_panel=MEASURING_PANEL
        ),
    ] = DEFAULT_REPEATS
    draft: Annotated[
        int,
        typer.Option(
            min=0,
            max=7,
            metavar="N",
            help="Also time steps of one row with 1 to N drafts.",
            show_default=False,
            rich_help_panel=MEASURING_PANEL,
        ),
    ] = 0
    scratch: Annotated[
        Path | None,
        typer.Option(
            readable=False,
            metavar="FOLDER",
            help="Where to write a SHAPE's random weights.",
            show_default="the user's cache",
            hidden=True,
            rich_help_panel=MEASURING_PANEL,
        ),
    ] = None
    keep: Annotated[
        bool,
        typer.Option(
            "--keep", help="Keep a SHAPE's weights for the next run.", hidden=True, rich_help_panel=MEASURING_PANEL
        ),
    ] = False

    def lengths(self, subject: Subject) -> tuple[list[int], list[int]]:
        """The prompts and the depths to measure.

        Raises: UsageError for those that leave no room in the model's context.
        """
        maximum = subject.model.config.max_position_embeddings
        longest = maximum - self.tokens - lazy.SPARE_TOKENS
        if longest < 1:
            raise UsageError(
                f"--tokens {self.tokens} leaves no room for a prompt: "
                f"the context limit of {subject.name} is {maximum} tokens"
            )
        prompts = _lengths("--prompt", self.prompt, longest, self.tokens) if self.prompt else _default_lengths(longest)
        depths = _lengths("--depth", self.depth, longest, self.tokens) if self.depth else prompts
        return prompts, depths


@dataclass(frozen=True)
class ReportOptions:
    """The form of the report.

    Raises: UsageError for two forms at once.
    """

    json_: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.", rich_help_panel=OUTPUT_PANEL)
    ] = False
    csv_: Annotated[
        bool,
        typer.Option("--csv", help="Print one line for each figure instead of tables.", rich_help_panel=OUTPUT_PANEL),
    ] = False

    def __post_init__(self) -> None:
        if self.json_ and self.csv_:
            raise UsageError("--json and --csv cannot be combined")


@with_groups
def bench(
    *,
    names: SubjectOptions,
    rows: RowsOption = "1",
    devices: ManyRowsDeviceOptions,
    kernel: KernelOption = None,
    measuring: MeasuringOptions,
    output: ReportOptions,
    messages: MessageOptions,
) -> None:
    """Measure the speed of a model and compare it with the prediction.

    A SHAPE gets random weights. With --kernel every figure is there twice, with llmcli's kernels and with yours.

    Examples:

    llmcli bench my-model

    llmcli bench Llama-2-7B --format int4 --rows 8 --json

    llmcli bench my-model --draft 7
    """
    num_rows = parse_rows(rows)
    options = devices.checked()
    kernels = read_kernels(kernel, options)
    subject = open_subject(names.chosen, names.form)
    refuse_scratch_of_model(subject, measuring.scratch, keep=measuring.keep)
    report = _measure(subject, options, measuring, num_rows, kernels)
    if output.json_:
        terminal.write_json(as_json(report))
    elif output.csv_:
        terminal.write(as_csv(report))
    else:
        terminal.write(facts_text(report))
        terminal.write(tables_text(report), is_drawn=True)


def _measure(
    subject: Subject,
    options: RunnerOptions,
    measuring: MeasuringOptions,
    num_rows: int | None,
    kernels: Sequence[OwnKernel],
) -> BenchReport:
    """Load the model and measure it, and say how far that is.

    Raises: LLMCliError and its subclasses
    """
    prompts, depths = measuring.lengths(subject)
    context = max(*prompts, *depths) + measuring.tokens + lazy.SPARE_TOKENS
    target = open_target(options, subject)
    planned = lazy.plan_bench(subject, target, context=context, num_rows=num_rows)
    terminal.info(f"{target.description} reads {target.read_bytes / 1e9:,.1f} GB/s")
    options = open_card(options, kernels, subject.model, context, planned.num_rows)
    comparison = None
    if kernels:
        files = {one.stem: str(one.path) for one in kernels}
        comparison = lazy.Comparison(files, opened_card(options).engine_kernels)
    with subject_files(subject, measuring.scratch, keep=measuring.keep) as model:
        start = time.perf_counter()
        with progress(f"loading {subject.full_name}") as on_progress:
            num_rows = planned.num_rows
            runner = load_runner(model, options, context, num_rows, on_progress, host_rows=num_rows, allows_less=False)
        load_seconds = time.perf_counter() - start
        terminal.info(f"{subject.full_name}: {runner.description}{options.note}, context {context}")
        figures = lazy.BenchOptions(
            prompts, depths, planned.num_rows, measuring.tokens, measuring.repeats, measuring.draft
        )
        meter = lazy.open_meter(options.card)
        with progress("measuring", unit="figures") as on_progress:
            return lazy.measure_subject(
                subject, target, planned, runner, load_seconds, figures, meter, on_progress, comparison
            )


def _default_lengths(longest: int) -> list[int]:
    return sorted({min(length, longest) for length in LENGTHS})


def _lengths(flag: str, lengths: list[int], longest: int, num_new_tokens: int) -> list[int]:
    if (largest := max(lengths)) > longest:
        raise UsageError(
            f"{flag} is {largest}; with {num_new_tokens} new tokens and {lazy.SPARE_TOKENS} spare ones that exceeds "
            f"the context limit; use at most {longest}"
        )
    return sorted(set(lengths))
