"""How the report of `bench` is written: as tables, JSON or CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmcli.cli.facts import fact_lines
from llmcli.cli.tables import format_table
from llmcli.cli.units import duration, rate

if TYPE_CHECKING:
    from llmcli.measure.bench import BenchReport, DecodeFigures, PromptFigures, Spread


def facts_text(report: BenchReport) -> str:
    """What was measured, a line each."""
    facts = (
        ("model", f"{report.model}, {report.precision}, KV cache {report.cache_type}, context {report.context}"),
        ("device", f"{report.device}, reads {report.read_bytes_per_second / 1e9:,.1f} GB/s"),
        ("checked", f"{report.num_checked_tokens} tokens, the same as generate's"),
        ("energy", _energy_fact(report)),
    )
    return fact_lines(facts, 18, sys.stdout)


def tables_text(report: BenchReport) -> str:
    """The figures of prompts and of decoding, as two tables."""
    header = ["prompt", "tokens/s", "spread", "predicted", "first token", "predicted", "runs"]
    prompts = [
        [
            str(item.num_tokens),
            rate(item.tokens_per_second),
            _spread(item.num_tokens, item.seconds),
            _or_dash(item.predicted_tokens_per_second, rate),
            duration(item.first_token_seconds.median),
            _or_dash(item.predicted_first_token_seconds, duration),
            str(item.seconds.num_runs),
        ]
        for item in report.prompts
    ]
    text = "\n" + format_table(header, prompts)
    header = ["depth", "rows", "tokens/s", "spread", "predicted", "GB/s", "of bandwidth", "runs"]
    has_energy = report.idle_watts is not None
    header += ["J/token", "W"] if has_energy else []
    decode = [
        [
            str(item.depth),
            str(item.num_rows),
            rate(item.tokens_per_second),
            _spread(item.num_rows, item.step_seconds),
            rate(item.predicted_tokens_per_second),
            f"{item.bytes_per_second / 1e9:,.1f}",
            f"{item.bandwidth_share:.1%}",
            str(item.step_seconds.num_runs),
            *(_energy_cells(item) if has_energy else []),
        ]
        for item in report.decode
    ]
    return text + "\n" + format_table(header, decode)


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
    """Everything, with the rates that follow from it."""
    return {
        **dataclasses.asdict(report),
        "prompts": [_prompt_record(item) for item in report.prompts],
        "decode": [_decode_record(item) for item in report.decode],
    }


def _prompt_record(item: PromptFigures) -> dict[str, Any]:
    return {
        **dataclasses.asdict(item),
        "tokens_per_second": item.tokens_per_second,
        "predicted_tokens_per_second": item.predicted_tokens_per_second,
    }


def _decode_record(item: DecodeFigures) -> dict[str, Any]:
    return {
        **dataclasses.asdict(item),
        "tokens_per_second": item.tokens_per_second,
        "predicted_tokens_per_second": item.predicted_tokens_per_second,
        "gbps": item.bytes_per_second / 1e9,
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
    "bandwidth_share",
    "joules_per_token",
    "average_watts",
)


def as_csv(report: BenchReport) -> str:
    """A line for each figure, under a header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for prompt in report.prompts:
        writer.writerow(
            {
                **_csv_rates(report, "prompt", prompt.num_tokens, 1, prompt.num_tokens, prompt.seconds),
                "predicted_tokens_per_second": prompt.predicted_tokens_per_second,
                "first_token_seconds": prompt.first_token_seconds.median,
                "predicted_first_token_seconds": prompt.predicted_first_token_seconds,
            }
        )
    for decode in report.decode:
        rows = decode.num_rows
        writer.writerow(
            {
                **_csv_rates(report, "decode", decode.depth, rows, rows, decode.step_seconds),
                "predicted_tokens_per_second": decode.predicted_tokens_per_second,
                "gbps": decode.bytes_per_second / 1e9,
                "bandwidth_share": decode.bandwidth_share,
                "joules_per_token": decode.joules_per_token,
                "average_watts": decode.average_watts,
            }
        )
    return text.getvalue()


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
