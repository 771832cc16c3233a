"""`llmcli generate`: continue a prompt."""

import secrets
from pathlib import Path
from typing import Annotated

import typer

from llmcli.cli.generate_output import TextOutput, result_json, show_stats
from llmcli.cli.options import (
    OUTPUT_PANEL,
    SAMPLING_PANEL,
    ContextOption,
    DebugOption,
    DeviceOption,
    DtypeOption,
    ModelOption,
    QuietOption,
    ThreadsOption,
    sampling_options,
)
from llmcli.cli.prompt import read_prompt
from llmcli.cli.session import DEFAULT_MAX_NEW_TOKENS, RunnerOptions, open_session
from llmcli.cli.terminal import terminal
from llmcli.engine.events import Finished
from llmcli.errors import UsageError

EXIT_INTERRUPTED = 130


@sampling_options
def generate(
    model: ModelOption,
    sampling_flags: dict[str, float | int | None],
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; `-` or none reads standard input.", show_default=False)
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="FILE", help="Read the prompt from a file.")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Stop after this many tokens.",
            show_default=f"{DEFAULT_MAX_NEW_TOKENS}, or fewer where the context is full",
        ),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Stop before this text appears; repeatable.")
    ] = None,
    num_samples: Annotated[
        int, typer.Option("-n", "--num-samples", min=1, metavar="K", help="How many continuations.")
    ] = 1,
    only: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Of the samples, only this one: the same text as among all.")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="story, precise, or a .toml file.", rich_help_panel=SAMPLING_PANEL),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=2**64 - 1,
            metavar="N",
            help="Same seed, same text.",
            show_default="random, and printed",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = None,
    context: ContextOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "float32",
    threads: ThreadsOption = None,
    json_: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of text.", rich_help_panel=OUTPUT_PANEL)
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Times, rates and settings, on stderr.", rich_help_panel=OUTPUT_PANEL)
    ] = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Continue a prompt, token by token.

    [bold]Examples[/bold]

    llmcli generate "Once upon a time" --model path/to/model --preset story

    llmcli generate --file chapter.txt -m path/to/model --temperature 0 --stop "THE END" --json
    """
    options = RunnerOptions(device, dtype, threads)
    samples = _sample_indices(num_samples, only)
    if stop and "" in stop:
        raise UsageError("--stop is empty, expected the text to stop at")
    text = read_prompt(prompt, file)
    session = open_session(model)
    sampling = session.resolve_sampling(sampling_flags, preset)
    prompt_token_ids = session.encode_prompt(text)
    max_seq_len = session.resolve_context(context)
    new_tokens = session.resolve_max_new_tokens(max_new_tokens, len(prompt_token_ids), max_seq_len)
    runner, load_seconds = session.load_runner(options, max_seq_len)

    run_seed = secrets.randbits(32) if seed is None else seed
    reason = " (this version has no CUDA runner yet)" if device == "auto" else ""
    terminal.info(f"{session.name}: {runner.description}{reason}, context {max_seq_len}, seed {run_seed}")
    generation = session.generation(
        runner,
        prompt_token_ids,
        sampling,
        seed=run_seed,
        samples=samples,
        max_new_tokens=new_tokens,
        stop_strings=tuple(stop or ()),
    )
    output = None if json_ else TextOutput(samples)
    if output:
        terminal.show_prompt(text)
    finished: list[Finished] = []
    is_interrupted = False
    try:
        for event in generation.events():
            if isinstance(event, Finished):
                finished.append(event)
            if output:
                output.show(event)
    except KeyboardInterrupt:
        is_interrupted = True
        for event in generation.interrupt():
            finished.append(event)
            if output:
                output.show(event)
    finished.sort(key=lambda item: item.sample)
    if finished and json_:
        result = result_json(
            finished,
            model=str(model),
            prompt_token_ids=prompt_token_ids,
            seed=run_seed,
            load_seconds=load_seconds,
            as_list=len(samples) > 1,
        )
        terminal.write(f"{result}\n")
    if finished and stats:
        show_stats(finished, sampling, run_seed, load_seconds)
    if is_interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _sample_indices(num_samples: int, only: int | None) -> tuple[int, ...]:
    """Indices from 0 of the samples to draw; on the command line they are numbered from 1."""
    if only is None:
        return tuple(range(num_samples))
    if num_samples > 1 and only > num_samples:
        raise UsageError(f"--only is {only}, expected 1 to {num_samples} (-n {num_samples})")
    return (only - 1,)
