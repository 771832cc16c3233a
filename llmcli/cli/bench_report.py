"""How the report of `bench` is written: as tables, JSON or CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from llmcli.cli import lazy
from llmcli.cli.own_kernels import change_text, speed_change
from llmcli.cli.tables import format_table
from llmcli.cli.terminal import fact_lines
from llmcli.cli.units import duration, rate

if TYPE_CHECKING:
    from llmcli.measure.bench import BenchReport, DecodeFigures, PromptFigures
    from llmcli.measure.draft_steps import DraftFigures
    from llmcli.measure.spread import Spread

_NOTE = "A change in parentheses may be chance: the runs of both overlap."

FiguresT = TypeVar("FiguresT", "PromptFigures", "DecodeFigures")


def facts_text(report: BenchReport) -> str:
    """What was measured, a line each."""
    facts = (
        ("model", f"{report.model}, {report.precision}, KV cache {report.cache_type}, context {report.context}"),
        ("device", f"{report.device}, reads {report.read_bytes_per_second / 1e9:,.1f} GB/s"),
        ("checked", _checked_fact(report)),
        ("energy", _energy_fact(report)),
        *_kernel_facts(report),
    )
    return fact_lines(facts, 18, sys.stdout)


def tables_text(report: BenchReport) -> str:
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
    """One row for each item; with kernels of the user's two, and how much faster theirs is."""
    if engine is None:
        return format_table(header, [cells(item) for item in items])
    rows: list[list[str]] = []
    item: FiguresT
    before: FiguresT
    for item, before in zip(items, engine, strict=True):
        rows += [[*cells(before), "llmcli", ""], [*cells(item), "yours", change_text(item.spread, before.spread)]]
    return format_table([*header, "kernels", "change"], rows)


def _prompt_cells(item: PromptFigures) -> list[str]:
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


def _decode_cells(item: DecodeFigures, has_energy: bool) -> list[str]:
    return [
        str(item.depth),
        str(item.num_rows),
        rate(item.tokens_per_second),
        _spread(item.num_rows, item.step_seconds),
        rate(item.predicted_tokens_per_second),
        f"{item.bytes_per_second / 1e9:,.1f}",
        f"{item.floor_share:.1%}",
        str(item.step_seconds.num_runs),
        *(_energy_cells(item) if has_energy else []),
    ]


def _draft_table(items: Sequence[DraftFigures]) -> str:
    """A step of one row by its drafts, and the gain where so many of a hundred are right."""
    header = ["depth", "drafts", "step", "steps of one", *(f"gain at {rate:.0%}" for rate in lazy.RATES), "runs"]
    return format_table(
        header,
        [
            [
                str(item.depth),
                str(item.num_drafts),
                duration(item.step_seconds.median),
                f"{item.steps_of_one:.2f}",
                *(f"{item.gain(rate):.2f}" for rate in lazy.RATES),
                str(item.step_seconds.num_runs),
            ]
            for item in items
        ],
    )


def _kernel_facts(report: BenchReport) -> list[tuple[str, str]]:
    if report.engine is None:
        return []
    files = ", ".join(f"{name} from {file}" for name, file in report.engine.own_kernels.items())
    return [("your kernels", f"{files}; the checks of each are passed")]


def _checked_fact(report: BenchReport) -> str:
    like = "in two equal runs" if report.speed_first else "as generate's"
    return f"{report.num_checked_tokens} tokens, the same {like}"


def _energy_fact(report: BenchReport) -> str:
    if report.idle_watts is None:
        return f"not available: {report.energy_problem or 'the counter cannot be read'}"
    return f"J/token leaves out the {report.idle_watts:.0f} W of the idle card, W includes them"


def _energy_cells(item: DecodeFigures) -> list[str]:
    return [_or_dash(item.joules_per_token, "{:.3g}".format), _or_dash(item.average_watts, "{:.0f}".format)]


def _spread(count: int, seconds: Spread) -> str:
    return f"{rate(count / seconds.slowest)} to {rate(count / seconds.fastest)}"


def _or_dash(value: float | None, written: Callable[[float], str]) -> str:
    return "-" if value is None else written(value)


def as_json(report: BenchReport) -> dict[str, Any]:
    """Everything, with the rates that follow from it; with kernels of the user's, each figure beside that of ours."""
    facts = dataclasses.asdict(report)
    engine = report.engine
    del facts["engine"], facts["draft_steps"]
    if engine is not None:
        facts["own_kernels"] = dict(engine.own_kernels)
    return {
        **facts,
        "prompts": _records(report.prompts, engine.prompts if engine else None, _prompt_record),
        "decode": _records(report.decode, engine.decode if engine else None, _decode_record),
        **({"draft_steps": [_draft_record(item) for item in report.draft_steps]} if report.draft_steps else {}),
    }


def _records(
    items: Sequence[FiguresT], engine: Sequence[FiguresT] | None, record: Callable[[FiguresT], dict[str, Any]]
) -> list[dict[str, Any]]:
    if engine is None:
        return [record(item) for item in items]
    return [
        {**record(item), "llmcli": record(before), "change": speed_change(item.spread, before.spread)}
        for item, before in zip(items, engine, strict=True)
    ]


def _prompt_record(item: PromptFigures) -> dict[str, Any]:
    return {
        **dataclasses.asdict(item),
        "tokens_per_second": item.tokens_per_second,
        "predicted_tokens_per_second": item.predicted_tokens_per_second,
        "floor_share": item.floor_share,
    }


def _decode_record(item: DecodeFigures) -> dict[str, Any]:
    return {
        **dataclasses.asdict(item),
        "tokens_per_second": item.tokens_per_second,
        "predicted_tokens_per_second": item.predicted_tokens_per_second,
        "floor_share": item.floor_share,
        "gbps": item.bytes_per_second / 1e9,
    }


def _draft_record(item: DraftFigures) -> dict[str, Any]:
    return {
        **dataclasses.asdict(item),
        "steps_of_one": item.steps_of_one,
        "gain": {str(rate): item.gain(rate) for rate in lazy.RATES},
    }


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


def as_csv(report: BenchReport) -> str:
    """A line for each figure, under a header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    if report.engine is not None:
        writer.writerows(_csv_rows(report, report.engine.prompts, report.engine.decode, "llmcli"))
    own = "llmcli" if report.engine is None else ",".join(report.engine.own_kernels)
    writer.writerows(_csv_rows(report, report.prompts, report.decode, own))
    for item in report.draft_steps:
        count = item.num_drafts + 1
        rates = _csv_rates(report, "draft step", item.depth, 1, count, item.step_seconds)
        writer.writerow({**rates, "kernels": own, "drafts": item.num_drafts})
    return text.getvalue()


def _csv_rows(
    report: BenchReport, prompts: Sequence[PromptFigures], decode: Sequence[DecodeFigures], kernels: str
) -> Iterator[dict[str, Any]]:
    for prompt in prompts:
        yield {
            **_csv_rates(report, "prompt", prompt.num_tokens, 1, prompt.num_tokens, prompt.seconds),
            "predicted_tokens_per_second": prompt.predicted_tokens_per_second,
            "first_token_seconds": prompt.first_token_seconds.median,
            "predicted_first_token_seconds": prompt.predicted_first_token_seconds,
            "floor_share": prompt.floor_share,
            "kernels": kernels,
        }
    for item in decode:
        yield {
            **_csv_rates(report, "decode", item.depth, item.num_rows, item.num_rows, item.step_seconds),
            "predicted_tokens_per_second": item.predicted_tokens_per_second,
            "gbps": item.bytes_per_second / 1e9,
            "floor_share": item.floor_share,
            "joules_per_token": item.joules_per_token,
            "average_watts": item.average_watts,
            "kernels": kernels,
        }


def _csv_rates(report: BenchReport, figure: str, length: int, rows: int, count: int, seconds: Spread) -> dict[str, Any]:
    return {
        "model": report.model,
        "device": report.device,
        "figure": figure,
        "length": length,
        "rows": rows,
        "runs": seconds.num_runs,
        "tokens_per_second": count / seconds.median,
        "slowest_tokens_per_second": count / seconds.slowest,
        "fastest_tokens_per_second": count / seconds.fastest,
    }
