"""`llmcli bench`: how fast a model is on this machine, and how near that comes to what its memory allows.

The report is written as tables, JSON or CSV.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from llmcli.cli import lazy, shared
from llmcli.cli.command import option
from llmcli.cli.device_choice import RunnerOptions, load_runner
from llmcli.cli.own_kernels import change_text, kernel_option, open_card, opened_card, read_kernels, speed_change
from llmcli.cli.progress import progress
from llmcli.cli.tables import csv_text, format_table
from llmcli.cli.targets import LENGTHS, open_subject, open_target, refuse_scratch_of_model, subject_files
from llmcli.cli.terminal import fact_lines, terminal
from llmcli.cli.units import duration, rate
from llmcli.errors import UsageError

_NOTE = "A change in parentheses may be chance: the runs of both overlap."

FiguresT = TypeVar("FiguresT", "lazy.bench.PromptFigures", "lazy.bench.DecodeFigures")

CSV_COLUMNS = (
    "model",
    "device",
    "figure",
    "length",
    "rows",
    "runs",
    "tokens_per_second",
    "slowest_tokens_per_second",
    "fastest_tokens_per_second",
    "predicted_tokens_per_second",
    "first_token_seconds",
    "predicted_first_token_seconds",
    "gbps",
    "floor_share",
    "joules_per_token",
    "average_watts",
    "kernels",
    "drafts",
)

measuring_option = partial(option, rich_help_panel="Measuring")
DEFAULT_NEW_TOKENS = 64
DEFAULT_REPEATS = 5


def facts_text(report: lazy.bench.BenchReport) -> str:
    """What was measured, a line each."""
    facts = [
        ("model", f"{report.model}, {report.precision}, KV cache {report.cache_type}, context {report.context}"),
        ("device", f"{report.device}, reads {report.read_bytes_per_second / 1e9:,.1f} GB/s"),
        ("checked", f"{report.num_checked_tokens} tokens, the same as generate's"),
    ]
    if report.idle_watts is None:
        facts.append(("energy", f"not available: {report.energy_problem or 'the counter cannot be read'}"))
    else:
        watts = f"{report.idle_watts:.0f} W"
        facts.append(("energy", f"J/token leaves out the {watts} of the idle card, W includes them"))
    if report.engine is not None:
        files = ", ".join(f"{name} from {file}" for name, file in report.engine.own_kernels.items())
        facts.append(("your kernels", f"{files}; the checks of each are passed"))
    return fact_lines(facts, 18, sys.stdout)


def tables_text(report: lazy.bench.BenchReport) -> str:
    """The figures of prompts and of decoding, as two tables."""
    engine = report.engine
    has_energy = report.idle_watts is not None
    header = ["prompt", "tokens/s", "spread", "predicted", "of floor", "first token", "predicted", "runs"]
    prompts = _table(header, report.prompts, engine.prompts if engine else None, _prompt_cells)
    header = ["depth", "rows", "tokens/s", "spread", "predicted", "GB/s", "of floor", "runs"]
    header += ["J/token", "W"] if has_energy else []
    decode = _table(
        header, report.decode, engine.decode if engine else None, lambda item: _decode_cells(item, has_energy)
    )
    drafts = f"\n{_draft_table(report.draft_steps)}" if report.draft_steps else ""
    note = "" if engine is None else f"\n{_NOTE}\n"
    return f"\n{prompts}\n{decode}{drafts}{note}"


def _table(
    header: Sequence[str],
    items: Sequence[FiguresT],
    engine: Sequence[FiguresT] | None,
    cells: Callable[[FiguresT], list[str]],
) -> str:
    """One row for each item; with the user's kernels two, and how much faster theirs are."""
    if engine is None:
        return format_table(header, [cells(item) for item in items])
    rows: list[list[str]] = []
    item: FiguresT
    before: FiguresT
    for item, before in zip(items, engine, strict=True):
        rows += [[*cells(before), "llmcli", ""], [*cells(item), "yours", change_text(item.spread, before.spread)]]
    return format_table([*header, "kernels", "change"], rows)


def _prompt_cells(item: lazy.bench.PromptFigures) -> list[str]:
    return [
        str(item.num_tokens),
        rate(item.tokens_per_second),
        _spread(item.num_tokens, item.seconds),
        _or_dash(item.predicted_tokens_per_second, rate),
        _or_dash(item.floor_share, "{:.1%}".format),
        duration(item.first_token_seconds.median),
        _or_dash(item.predicted_first_token_seconds, duration),
        str(item.seconds.num_runs),
    ]


def _decode_cells(item: lazy.bench.DecodeFigures, has_energy: bool) -> list[str]:
    energy = [_or_dash(item.joules_per_token, "{:.3g}".format), _or_dash(item.average_watts, "{:.0f}".format)]
    return [
        str(item.depth),
        str(item.num_rows),
        rate(item.tokens_per_second),
        _spread(item.num_rows, item.step_seconds),
        rate(item.predicted_tokens_per_second),
        f"{item.bytes_per_second / 1e9:,.1f}",
        f"{item.floor_share:.1%}",
        str(item.step_seconds.num_runs),
        *(energy if has_energy else []),
    ]


def _draft_table(items: Sequence[lazy.bench.DraftFigures]) -> str:
    """A step of one row by its drafts, and the gain for each share of right drafts."""
    header = ["depth", "drafts", "step", "steps of one", *(f"gain at {rate:.0%}" for rate in lazy.bench.RATES), "runs"]
    return format_table(
        header,
        [
            [
                str(item.depth),
                str(item.num_drafts),
                duration(item.step_seconds.median),
                f"{item.steps_of_one:.2f}",
                *(f"{item.gain(rate):.2f}" for rate in lazy.bench.RATES),
                str(item.step_seconds.num_runs),
            ]
            for item in items
        ],
    )


def _spread(count: int, seconds: lazy.bench.Spread) -> str:
    return f"{rate(count / seconds.slowest)} to {rate(count / seconds.fastest)}"


def _or_dash(value: float | None, written: Callable[[float], str]) -> str:
    return "-" if value is None else written(value)


def as_json(report: lazy.bench.BenchReport) -> dict[str, Any]:
    """Everything, with the rates that follow from it; with kernels of the user's, each figure next to ours."""
    facts = dataclasses.asdict(report)
    engine = report.engine
    del facts["engine"], facts["draft_steps"]
    if engine is not None:
        facts["own_kernels"] = dict(engine.own_kernels)
    facts["prompts"] = _records(report.prompts, engine.prompts if engine else None)
    facts["decode"] = _records(report.decode, engine.decode if engine else None)
    if report.draft_steps:
        facts["draft_steps"] = [
            {
                **dataclasses.asdict(item),
                "steps_of_one": item.steps_of_one,
                "gain": {str(rate): item.gain(rate) for rate in lazy.bench.RATES},
            }
            for item in report.draft_steps
        ]
    return facts


def _records(items: Sequence[FiguresT], engine: Sequence[FiguresT] | None) -> list[dict[str, Any]]:
    if engine is None:
        return [_record(item) for item in items]
    return [
        {**_record(item), "llmcli": _record(before), "change": speed_change(item.spread, before.spread)}
        for item, before in zip(items, engine, strict=True)
    ]


def _record(item: lazy.bench.PromptFigures | lazy.bench.DecodeFigures) -> dict[str, Any]:
    rates = ("tokens_per_second", "predicted_tokens_per_second", "floor_share")
    gbps = {"gbps": item.bytes_per_second / 1e9} if isinstance(item, lazy.bench.DecodeFigures) else {}
    return {**dataclasses.asdict(item), **{name: getattr(item, name) for name in rates}, **gbps}


def as_csv(report: lazy.bench.BenchReport) -> str:
    """A line for each figure, under a header."""
    own = "llmcli" if report.engine is None else ",".join(report.engine.own_kernels)
    rows = [] if report.engine is None else _csv_rows(report.engine.prompts, report.engine.decode, "llmcli")
    rows += _csv_rows(report.prompts, report.decode, own)
    for item in report.draft_steps:
        row = _csv_row(item, "draft step", item.depth, 1, item.num_drafts + 1, item.step_seconds)
        rows.append({**row, "kernels": own})
    return csv_text(CSV_COLUMNS, ({"model": report.model, "device": report.device, **row} for row in rows))


def _csv_rows(
    prompts: Sequence[lazy.bench.PromptFigures], decode: Sequence[lazy.bench.DecodeFigures], kernels: str
) -> list[dict[str, Any]]:
    rows = []
    for prompt in prompts:
        row = _csv_row(prompt, "prompt", prompt.num_tokens, 1, prompt.num_tokens, prompt.seconds)
        rows.append({**row, "first_token_seconds": prompt.first_token_seconds.median, "kernels": kernels})
    for item in decode:
        row = _csv_row(item, "decode", item.depth, item.num_rows, item.num_rows, item.step_seconds)
        rows.append({**row, "gbps": item.bytes_per_second / 1e9, "kernels": kernels})
    return rows


def _csv_row(
    item: object, figure: str, length: int, rows: int, count: int, seconds: lazy.bench.Spread
) -> dict[str, Any]:
    """What the item has of the columns, and what follows from `seconds` for `count` tokens."""
    return {
        **{name: getattr(item, name) for name in CSV_COLUMNS if hasattr(item, name)},
        "figure": figure,
        "length": length,
        "rows": rows,
        "runs": seconds.num_runs,
        "tokens_per_second": count / seconds.median,
        "slowest_tokens_per_second": count / seconds.slowest,
        "fastest_tokens_per_second": count / seconds.fastest,
        "drafts": getattr(item, "num_drafts", None),
    }


@dataclass(frozen=True)
class MeasuringOptions:
    """What is measured, and where a shape's weights are kept."""

    prompt: list[int] | None = measuring_option(
        None,
        "Prompt length in tokens; repeatable.",
        min=1,
        metavar="N",
        show_default="128 and 2048, as far as the context limit allows",
    )
    depth: list[int] | None = measuring_option(
        None,
        "Tokens in the KV cache when decoding begins; repeatable.",
        min=1,
        metavar="N",
        show_default="as --prompt",
        hidden=True,
    )
    tokens: int = measuring_option(DEFAULT_NEW_TOKENS, "New tokens in each run.", min=1)
    repeats: int = measuring_option(DEFAULT_REPEATS, "Runs per figure; long ones are repeated less.", min=1)
    draft: int = measuring_option(0, "Also time steps of one row with 1 to N drafts.", min=0, max=7, show_default=False)
    scratch: Path | None = shared.scratch_option(rich_help_panel="Measuring")
    keep: bool = measuring_option(False, "Keep a SHAPE's weights for the next run.", hidden=True)

    def lengths(self, subject: lazy.subject.Subject) -> tuple[list[int], list[int]]:
        """The prompts and the depths to measure.

        Raises: UsageError for those that do not fit in the model's context.
        """
        maximum = subject.model.config.max_position_embeddings
        longest = maximum - self.tokens - lazy.bench.SPARE_TOKENS
        if longest < 1:
            raise UsageError(
                f"--tokens {self.tokens} leaves no room for a prompt: "
                f"the context limit of {subject.name} is {maximum} tokens"
            )
        usual = sorted({min(length, longest) for length in LENGTHS})
        prompts = _lengths("--prompt", self.prompt, longest, self.tokens) if self.prompt else usual
        depths = _lengths("--depth", self.depth, longest, self.tokens) if self.depth else prompts
        return prompts, depths


@dataclass(frozen=True)
class ReportOptions:
    """The form of the report. Raises: UsageError for two forms at once"""

    json_: bool = shared.output_option(False, "Print one JSON object instead of tables.")
    csv_: bool = shared.output_option(False, "Print one line for each figure instead of tables.")

    def __post_init__(self) -> None:
        if self.json_ and self.csv_:
            raise UsageError("--json and --csv cannot be combined")


def bench(
    *,
    names: shared.SubjectOptions,
    rows: str = shared.rows_option("1"),
    devices: shared.DeviceOptions,
    kernel: list[str] | None = kernel_option(),
    measuring: MeasuringOptions,
    output: ReportOptions,
    messages: shared.MessageOptions,
) -> None:
    """Measure the speed of a model and compare it with the prediction.

    A SHAPE gets random weights. With --kernel every figure is there twice, with llmcli's kernels and with yours.

    Examples:

    llmcli bench my-model

    llmcli bench Llama-2-7B --format int4 --rows 8 --json

    llmcli bench my-model --draft 7
    """
    num_rows = shared.parse_rows(rows)
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
    subject: lazy.subject.Subject,
    options: RunnerOptions,
    measuring: MeasuringOptions,
    num_rows: int | None,
    kernels: Sequence[lazy.own_kernel.OwnKernel],
) -> lazy.bench.BenchReport:
    """Load the model and measure it, and show progress. Raises: LLMCliError and its subclasses"""
    prompts, depths = measuring.lengths(subject)
    context = max(*prompts, *depths) + measuring.tokens + lazy.bench.SPARE_TOKENS
    target = open_target(options, subject)
    planned = lazy.subject.plan_bench(subject, target, context=context, num_rows=num_rows)
    terminal.info(f"{target.description} reads {target.read_bytes / 1e9:,.1f} GB/s")
    options = open_card(options, kernels, subject.model, context, planned.num_rows)
    comparison = None
    if kernels:
        files = {one.stem: str(one.path) for one in kernels}
        comparison = lazy.bench.KernelComparison(files, opened_card(options).engine_kernels)
    with subject_files(subject, measuring.scratch, keep=measuring.keep) as model:
        start = time.perf_counter()
        with progress(f"loading {subject.full_name}") as on_progress:
            num_rows = planned.num_rows
            runner = load_runner(model, options, context, num_rows, on_progress, host_rows=num_rows, allows_less=False)
        load_seconds = time.perf_counter() - start
        terminal.info(f"{subject.full_name}: {runner.description}{options.note}, context {context}")
        figures = lazy.bench.BenchOptions(
            prompts, depths, planned.num_rows, measuring.tokens, measuring.repeats, measuring.draft
        )
        meter = lazy.energy.open_meter(options.card)
        with progress("measuring", unit="figures") as on_progress:
            return lazy.subject.measure_subject(
                subject, target, planned, runner, load_seconds, figures, meter, on_progress, comparison
            )


def _lengths(flag: str, lengths: list[int], longest: int, num_new_tokens: int) -> list[int]:
    if (largest := max(lengths)) > longest:
        raise UsageError(
            f"{flag} is {largest}; with {num_new_tokens} new tokens and {lazy.bench.SPARE_TOKENS} spare ones that "
            f"exceeds the context limit; use at most {longest}"
        )
    return sorted(set(lengths))
