"""`llmcli generate`: continue a prompt, or answer one with the model's chat template."""

import secrets
from pathlib import Path
from typing import Annotated

import typer

from llmcli.cli.deferred import open_energy_meter
from llmcli.cli.device_choice import RunnerOptions, start_device
from llmcli.cli.options import (
    OUTPUT_PANEL,
    PROMPT_PANEL,
    SAMPLING_PANEL,
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
from llmcli.cli.output.base import RunFacts
from llmcli.cli.output.choice import OutputOptions, open_outputs
from llmcli.cli.process_age import process_age
from llmcli.cli.prompt import checked_stop_strings, read_prompt, refuse_undecoded
from llmcli.cli.sampler_flags import parse_sampler_flags
from llmcli.cli.session import DEFAULT_MAX_NEW_TOKENS, open_session
from llmcli.cli.terminal import terminal
from llmcli.engine.events import Event, Finished
from llmcli.errors import EXIT_INTERRUPTED, UsageError
from llmcli.resources import STORYTELLER
from llmcli.timeline import IMPORTS, Timeline


@sampling_options
def generate(
    sampling_flags: dict[str, float | int | None],
    model: ModelOption = None,
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; `-` or none reads standard input.", show_default=False)
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", metavar="FILE", help="Read the prompt from a file.", rich_help_panel=PROMPT_PANEL),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="The prompt is a message: answer it by the chat template.", rich_help_panel=PROMPT_PANEL
        ),
    ] = False,
    system: SystemOption = None,
    chat_template: ChatTemplateOption = None,
    show_prompt: Annotated[
        bool, typer.Option("--show-prompt", help="Show the prompt's text and ids.", rich_help_panel=PROMPT_PANEL)
    ] = False,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Stop after this many tokens.",
            show_default=f"the model's, or {DEFAULT_MAX_NEW_TOKENS}, or fewer where the context is full",
            rich_help_panel=STOPPING_PANEL,
        ),
    ] = None,
    stop: StopOption = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Never end the text by itself.", rich_help_panel=STOPPING_PANEL)
    ] = False,
    num_samples: Annotated[
        int,
        typer.Option(
            "-n",
            "--num-samples",
            min=1,
            max=10_000,
            metavar="K",
            help="How many continuations.",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = 1,
    only: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=2**32,
            metavar="K",
            help="Of the samples, only this one: the same text as among all.",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = None,
    preset: PresetOption = None,
    logit_bias: LogitBiasOption = None,
    sampler_order: SamplerOrderOption = None,
    dry_breaker: DryBreakerOption = None,
    seed: SeedOption = None,
    context: ContextOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    kv_cache: KvCacheOption = "auto",
    threads: ThreadsOption = None,
    json_: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of text.", rich_help_panel=OUTPUT_PANEL)
    ] = False,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="One JSON object a token, as they come.", rich_help_panel=OUTPUT_PANEL)
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=100,
            metavar="K",
            help="With --json or --jsonl: log-probability of each token and of the K likeliest.",
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = None,
    color: Annotated[
        str | None,
        typer.Option(metavar="prob", help="Tint each token by its probability: prob.", rich_help_panel=OUTPUT_PANEL),
    ] = None,
    why: Annotated[
        bool,
        typer.Option("--why", help="For each token, what each sampler step removed.", rich_help_panel=OUTPUT_PANEL),
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write both as a page to look at.", rich_help_panel=OUTPUT_PANEL),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an older page of --html.", rich_help_panel=OUTPUT_PANEL)
    ] = False,
    stats: Annotated[
        str | None,
        typer.Option(
            "--stats",
            metavar="[start]",
            help="Times, rates and settings, on stderr; start: where the time to the first token went.",
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = None,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Continue a prompt, token by token.

    [bold]Examples[/bold]

    llmcli generate "Once upon a time"

    llmcli generate --file chapter.txt -m path/to/model --temperature 0 --stop "THE END" --json
    """
    timeline = Timeline(process_age() if stats == "start" else 0.0)
    timeline.since(IMPORTS, 0.0)
    output_options = OutputOptions(json_, jsonl, logprobs, color, why, html, stats, force)
    samples = _sample_indices(num_samples, only)
    flags = parse_sampler_flags(logit_bias, sampler_order, dry_breaker, ignore_eos=ignore_eos)
    stop_strings = checked_stop_strings(stop)
    if system is not None:
        refuse_undecoded(system, "--system")
    if not chat and (system is not None or chat_template is not None):
        raise UsageError("--system and --chat-template belong to --chat; add it")
    start_device(device, timeline)
    with timeline.part("driver and CuPy"):
        runner_options = RunnerOptions(device, dtype, threads, kv_cache)
    text = read_prompt(prompt, file)
    session = open_session(model, timeline)
    sampling = session.resolve_sampling(sampling_flags, preset, flags, stop_strings)
    stop_strings = session.resolve_stop_strings(stop_strings)
    session.say_what_is_not_applied()
    with timeline.part("tokenizer"):
        encoded = session.encode_message(text, system, chat_template) if chat else session.encode_prompt(text)
    if show_prompt:
        terminal.show(f"{encoded.text}\n{' '.join(map(str, encoded.token_ids))}\n")
    max_seq_len = session.resolve_context(context)
    new_tokens = session.resolve_max_new_tokens(max_new_tokens, len(encoded.token_ids), max_seq_len)
    run_seed = secrets.randbits(32) if seed is None else seed
    sampler = session.sampler(sampling.params, run_seed, encoded, flags)

    runner, load_seconds = session.load_runner(runner_options, max_seq_len, len(samples), timeline)
    terminal.info(f"{session.name}: {runner.description}{runner_options.note}, context {max_seq_len}, seed {run_seed}")
    facts = RunFacts(
        model=model if model is not None else STORYTELLER,
        name=session.name,
        prompt=text,
        prompt_token_ids=encoded.token_ids,
        sampling=sampling,
        seed=run_seed,
        samples=samples,
        load_seconds=load_seconds,
        cache_type=runner.cache_type,
        tokenizer=session.tokenizer,
        timeline=timeline if stats == "start" else None,
        meter=open_energy_meter(runner_options.card) if stats == "run" else None,
    )
    outputs = open_outputs(output_options, facts)
    request = session.request(
        encoded,
        sampler,
        samples=samples,
        max_new_tokens=new_tokens,
        stop_strings=stop_strings,
        num_alternatives=output_options.num_alternatives,
    )
    generation = session.generation(runner, request)
    if output_options.shows_text:
        terminal.show_prompt(text if not chat else "")
    finished: list[Finished] = []

    def take(event: Event) -> None:
        if isinstance(event, Finished):
            finished.append(event)
        for output in outputs:
            output.show(event)

    is_interrupted = False
    try:
        for event in generation.events():
            take(event)
    except KeyboardInterrupt:
        is_interrupted = True
        for event in generation.interrupt():
            take(event)
    finished.sort(key=lambda item: item.sample)
    for output in outputs:
        output.finish(finished)
    if is_interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _sample_indices(num_samples: int, only: int | None) -> tuple[int, ...]:
    """Indices from 0 of the samples to draw; on the command line they are numbered from 1."""
    if only is None:
        return tuple(range(num_samples))
    if num_samples > 1 and only > num_samples:
        raise UsageError(f"--only is {only}, expected 1 to {num_samples} (-n {num_samples})")
    return (only - 1,)
