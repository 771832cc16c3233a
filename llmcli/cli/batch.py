"""`llmcli batch`: many prompts in one run, one line of JSON for each."""

import re
from typing import Annotated

import typer

from llmcli.cli.batch_job import BatchOptions, open_job
from llmcli.cli.batch_prompts import PromptSettings
from llmcli.cli.batch_report import show_check
from llmcli.cli.batch_run import run_job
from llmcli.cli.device_choice import RunnerOptions, start_device
from llmcli.cli.options import (
    MODEL_PANEL,
    OUTPUT_PANEL,
    PROMPT_PANEL,
    STOPPING_PANEL,
    ChatTemplateOption,
    ContextOption,
    DebugOption,
    DeviceOption,
    DryBreakerOption,
    DtypeOption,
    KvCacheOption,
    LogitBiasOption,
    ModelOption,
    PresetOption,
    QuietOption,
    SamplerOrderOption,
    SeedOption,
    StopOption,
    SystemOption,
    ThreadsOption,
    sampling_options,
)
from llmcli.cli.prompt import checked_stop_strings, refuse_undecoded
from llmcli.cli.sampler_flags import parse_sampler_flags
from llmcli.cli.session import DEFAULT_MAX_NEW_TOKENS
from llmcli.errors import UsageError

AUTO = "auto"


@sampling_options
def batch(
    sampling_flags: dict[str, float | int | None],
    source: Annotated[
        str, typer.Argument(metavar="IN", help="JSON Lines, one prompt a line; `-` reads standard input.")
    ],
    output: Annotated[str, typer.Argument(metavar="OUT", help="File of results; `-` writes standard output.")],
    model: ModelOption = None,
    text: Annotated[
        bool, typer.Option("--text", help="Each line of IN is a prompt as it stands.", rich_help_panel=PROMPT_PANEL)
    ] = False,
    system: SystemOption = None,
    chat_template: ChatTemplateOption = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Stop each text after this many tokens.",
            show_default=f"the model's, or {DEFAULT_MAX_NEW_TOKENS}, or fewer where the context is full",
            rich_help_panel=STOPPING_PANEL,
        ),
    ] = None,
    stop: StopOption = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ignore end-of-text tokens.", rich_help_panel=STOPPING_PANEL)
    ] = False,
    preset: PresetOption = None,
    logit_bias: LogitBiasOption = None,
    sampler_order: SamplerOrderOption = None,
    dry_breaker: DryBreakerOption = None,
    seed: SeedOption = None,
    rows: Annotated[
        str, typer.Option(metavar="N|auto", help="Prompts that run side by side.", rich_help_panel=MODEL_PANEL)
    ] = AUTO,
    context: ContextOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    kv_cache: KvCacheOption = "auto",
    threads: ThreadsOption = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Check IN and OUT, say what the run takes, and end.", rich_help_panel=OUTPUT_PANEL
        ),
    ] = False,
    ordered: Annotated[
        bool, typer.Option("--ordered", help="Write results in the order of IN.", rich_help_panel=OUTPUT_PANEL)
    ] = False,
    stats: Annotated[
        str | None,
        typer.Option("--stats", metavar="", help="Times, rates and rows, on stderr.", rich_help_panel=OUTPUT_PANEL),
    ] = None,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Run many prompts, one a line, and write one line of JSON for each.

    Run again, it goes on where it ended: what OUT holds is not run a second time.

    [bold]Examples[/bold]

    llmcli batch prompts.jsonl results.jsonl -m path/to/model --seed 1

    llmcli batch --text - - --max-new-tokens 20 < prompts.txt | jq -r .text
    """
    flags = parse_sampler_flags(logit_bias, sampler_order, dry_breaker, ignore_eos=ignore_eos)
    if system is not None:
        refuse_undecoded(system, "--system")
    if stats not in (None, "run"):
        raise UsageError(f"--stats is {stats!r}, expected no value")
    settings = PromptSettings(
        sampling_flags, flags, preset, system, chat_template, checked_stop_strings(stop), max_new_tokens, context
    )
    options = BatchOptions(source, output, model, text, check, ordered, seed, _parse_rows(rows), stats is not None)
    start_device(device)
    runner_options = RunnerOptions(device, dtype, threads, kv_cache)
    with open_job(options, settings) as job:
        if check:
            show_check(job, runner_options)
        else:
            run_job(job, runner_options)


def _parse_rows(rows: str) -> int | None:
    """The value of --rows; None for `auto`."""
    if rows == AUTO:
        return None
    if not re.fullmatch("[1-9][0-9]{0,8}", rows):
        raise UsageError(f"--rows is {rows!r}, expected {AUTO} or a number from 1")
    return int(rows)
