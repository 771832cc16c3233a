"""`llmcli eval`: perplexity of a model on a text, and how far a second model is from it."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from llmcli.cli.deferred import evaluate_models, require_same_tokenizer
from llmcli.cli.device_choice import RunnerOptions
from llmcli.cli.options import (
    MODEL_PANEL,
    DebugOption,
    DeviceOption,
    DtypeOption,
    KvCacheOption,
    ModelArgument,
    ModelOption,
    QuietOption,
    ThreadsOption,
    chosen_model,
)
from llmcli.cli.prompt import read_prompt
from llmcli.cli.session import open_session
from llmcli.cli.terminal import terminal
from llmcli.errors import UsageError

DEFAULT_WINDOW = 2048


def evaluate(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", metavar="FILE", help="The text.", show_default="standard input"),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A second model, compared with the first token by token.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            min=8,
            metavar="N",
            help="Tokens run together.",
            show_default=f"the model's maximum, at most {DEFAULT_WINDOW}",
            rich_help_panel=MODEL_PANEL,
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Tokens scored in each window but the first; the others are context.",
            show_default="half the context",
        ),
    ] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    kv_cache: KvCacheOption = "auto",
    threads: ThreadsOption = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure a model's perplexity on a text with a strided window; with --against, also a second model's.

    With --kv-cache int8 the second model keeps its keys and values in 8 bits; without --against that is the same model.

    [bold]Examples[/bold]

    llmcli eval path/to/model --file text.txt

    llmcli eval path/to/model --against path/to/model-int8 --file text.txt --json

    llmcli eval path/to/model --kv-cache int8 --file text.txt
    """
    options = RunnerOptions(device, dtype, threads, kv_cache)
    name = chosen_model(model, model_option)
    text = read_prompt(None, file)
    sessions = [open_session(name)]
    if against is not None:
        sessions.append(open_session(against))
        require_same_tokenizer(*sessions)
    elif kv_cache != "auto":
        sessions *= 2
    caches = ["auto", kv_cache][: len(sessions)]
    window = min(session.resolve_context(context, DEFAULT_WINDOW) for session in sessions)
    step = window // 2 if stride is None else stride
    if step > window - 2:
        raise UsageError(f"--stride {step} leaves no context in a window of {window}; use at most {window - 2}")
    evaluations, comparison = evaluate_models(sessions, options, text, window=window, stride=step)
    if json_:
        models = [
            {"model": session.name, "kv_cache": cache, "perplexity": evaluation.perplexity}
            | dataclasses.asdict(evaluation)
            for session, cache, evaluation in zip(sessions, caches, evaluations, strict=True)
        ]
        divergence = {"mean_kl": comparison.mean_kl, "top1_agreement": comparison.top1_agreement} if comparison else {}
        terminal.write_json({"models": models, **divergence})
        return
    for session, cache, evaluation in zip(sessions, caches, evaluations, strict=True):
        shown = session.name if cache == "auto" else f"{session.name}, KV cache {cache}"
        terminal.write(f"{shown}: perplexity {evaluation.perplexity:.4f}\n")
    if comparison is not None:
        change = evaluations[1].perplexity / evaluations[0].perplexity - 1
        terminal.write(
            f"change of perplexity {change:+.3%}, mean KL divergence {comparison.mean_kl:.3g} nats a token, "
        )
        terminal.write(f"top-1 agreement {comparison.top1_agreement:.2%}\n")
    terminal.write(f"{evaluations[0].num_tokens} tokens, windows of {window}, stride {step}\n")
