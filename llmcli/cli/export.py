"""What `quantize` and `convert` need beside their flags: an exporter for a source, and what it did to a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.cli import lazy
from llmcli.cli.device_choice import RunnerOptions
from llmcli.cli.options import AdapterChoice, add_adapters, with_adapters
from llmcli.cli.progress import say_compiling
from llmcli.cli.prompt import read_text
from llmcli.cli.scoring import evaluate_models
from llmcli.cli.session import model_folder, open_session, shown_name
from llmcli.cli.terminal import terminal
from llmcli.cli.units import divergence
from llmcli.resources import resource_folder

if TYPE_CHECKING:
    from llmcli.checkpoint.export import Exporter
    from llmcli.checkpoint.export_options import ExportOptions
    from llmcli.checkpoint.export_source import SourceState
    from llmcli.checkpoint.model import Model
    from llmcli.checkpoint.planned_weight import PlannedWeight
    from llmcli.runners.cuda.quantizer import CardQuantizer

BUILTIN_TEXT = "builtin"
EVALUATION_WINDOW = 2048


def open_export(
    source: str,
    destination: Path,
    options: ExportOptions,
    adapters: Sequence[AdapterChoice] = (),
    *,
    card: int | None,
    replace: bool,
    dry_run: bool,
) -> Exporter:
    """Check the source, its adapters and the destination of an export and plan it; `card` None is the CPU.

    Raises: UsageError, CheckpointError and DeviceError, with their subclasses.
    """
    opened = _open_source(source, destination, replace=replace, dry_run=dry_run)
    plan = lazy.plan_export(add_adapters(opened.model, adapters), options, opened.state)
    if card is None:
        return lazy.Exporter(plan, opened.destination, opened.name, replace=replace)
    open_quantizer = partial(_open_card_quantizer, card, plan.weights)
    return lazy.Exporter(plan, opened.destination, opened.name, replace=replace, open_quantizer=open_quantizer)


def open_conversion(source: str, destination: Path, shard_bytes: int, *, replace: bool, dry_run: bool) -> Exporter:
    """Check the source and the destination of a conversion and plan it.

    Raises: UsageError and CheckpointError, with their subclasses.
    """
    opened = _open_source(source, destination, replace=replace, dry_run=dry_run)
    plan = lazy.plan_conversion(opened.model, opened.state, shard_bytes)
    return lazy.Exporter(plan, opened.destination, opened.name, replace=replace)


@dataclass(frozen=True)
class _Opened:
    """A source with the state of its files, its name in the cards, and the resolved destination."""

    model: Model
    state: SourceState
    name: str
    destination: Path


def _open_source(source: str, destination: Path, *, replace: bool, dry_run: bool) -> _Opened:
    destination = lazy.resolve_destination(destination)  # before anything is downloaded
    if not dry_run:
        lazy.refuse_existing(destination, replace=replace)
    folder = model_folder(source)
    state = lazy.SourceState.record(folder)
    model = lazy.open_model(folder)
    name = shown_name(source, folder)
    lazy.require_text(name, "the name of the source")
    return _Opened(model, state, name, destination)


def _open_card_quantizer(card: int, weights: Sequence[PlannedWeight]) -> CardQuantizer:
    device = lazy.Device.open(card)
    terminal.info(f"quantizing on {device.name} (cuda:{device.index})")
    return lazy.CardQuantizer(device, weights, on_compile=say_compiling)


def evaluate_export(
    source: str, adapters: Sequence[AdapterChoice], destination: Path, text: str, options: RunnerOptions
) -> None:
    """Measure what quantizing did to a text: `builtin`, or a file. The figures go into the export's cards.

    Raises: UsageError for a text that cannot be read.
    """
    content, name = read_evaluation_text(text)
    sessions = [with_adapters(open_session(source), adapters), open_session(str(destination))]
    window = sessions[0].resolve_context(None, EVALUATION_WINDOW)
    (before, after), comparison = evaluate_models(sessions, options, content, window=window, stride=window // 2)
    assert comparison is not None
    lazy.add_evaluation(
        destination,
        {
            "text": name,
            "num_tokens": before.num_tokens,
            "window": before.window,
            "stride": before.stride,
            "perplexity_before": before.perplexity,
            "perplexity_after": after.perplexity,
            "mean_kl": comparison.mean_kl,
            "top1_agreement": comparison.top1_agreement,
        },
    )
    terminal.info(
        f"perplexity {before.perplexity:.4f} -> {after.perplexity:.4f} "
        f"({after.perplexity / before.perplexity - 1:+.3%}), "
        f"mean KL {divergence(comparison.mean_kl)} nats, top-1 agreement {comparison.top1_agreement:.2%}, on {name}"
    )


def read_evaluation_text(choice: str) -> tuple[str, str]:
    """The text of `--eval` and its name: the built-in one, or a file.

    Raises: UsageError for a file that cannot be read.
    """
    if choice == BUILTIN_TEXT:
        path = resource_folder("configs") / "texts" / "stories.txt"
        return path.read_text(encoding="utf-8"), "the built-in stories"
    return read_text(Path(choice), "--eval"), Path(choice).name
