"""Doors to rooms whose import is slow: each function imports what it needs when it is called.

What runs a model goes through `session.py`; the rest of the commands come through here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.checkpoint.hub_id import HubId, find_hub_id
from llmcli.cli.device_choice import RunnerOptions
from llmcli.cli.prompt import read_prompt
from llmcli.cli.session import Session, model_folder, open_session
from llmcli.cli.terminal import terminal
from llmcli.errors import UsageError
from llmcli.resources import resource_folder

if TYPE_CHECKING:
    from llmcli.batch.run import Scheduler
    from llmcli.checkpoint.export import Exporter
    from llmcli.checkpoint.export_options import ExportOptions
    from llmcli.checkpoint.hub_cache import CachedModels, Removal
    from llmcli.checkpoint.planned_weight import PlannedWeight
    from llmcli.config.presets import Preset
    from llmcli.measure.diff import DiffToken, Verdict
    from llmcli.measure.doctor import Check
    from llmcli.measure.energy import EnergyMeter
    from llmcli.measure.evaluate import Comparison, Evaluation
    from llmcli.measure.info import ModelInfo
    from llmcli.runners.base import Runner
    from llmcli.runners.cuda.quantizer import CardQuantizer
    from llmcli.tokenizer.base import Tokenizer

BUILTIN_TEXT = "builtin"
EVALUATION_WINDOW = 2048


def list_cached_models() -> CachedModels:
    """What the hub's cache holds."""
    from llmcli.checkpoint.hub_cache import list_cached_models

    return list_cached_models()


def plan_removal(hub_id: HubId) -> Removal:
    """What removing a model from the hub's cache would remove.

    Raises: CheckpointError if it is not there.
    """
    from llmcli.checkpoint.hub_cache import plan_removal

    return plan_removal(hub_id)


def open_tokenizer(name: str | None) -> Tokenizer:
    """Load the tokenizer of a model, named as for `model_folder`; the weights may be missing.

    Raises: CheckpointError and its subclasses.
    """
    from llmcli.tokenizer.load import load_tokenizer

    return load_tokenizer(model_folder(name))


def decode_tokens(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """The text of token ids, as the start of a text."""
    from llmcli.tokenizer.stream import decode

    return decode(tokenizer, token_ids, at_start=True)


def read_presets() -> list[Preset]:
    """Every preset that can be named."""
    from llmcli.config.presets import list_presets

    return list_presets()


def model_info(name: str | None, context: int | None) -> ModelInfo:
    """Facts about a model, for `info`."""
    from llmcli.measure.info import inspect_model
    from llmcli.tokenizer.chat_template import load_chat_template

    session = open_session(name)
    sampling = session.resolve_sampling({}, None)
    max_seq_len = session.resolve_context(context)
    try:
        template = load_chat_template(session.model.checkpoint.folder, session.tokenizer).origin
    except UsageError:  # there is none
        template = None
    return inspect_model(session.model, session.tokenizer, session.eos_token_ids, sampling, template, max_seq_len)


def examine_machine() -> list[Check]:
    """Whether this machine is ready, check by check."""
    from llmcli.measure.doctor import examine

    return examine()


def open_energy_meter(card: int | None) -> EnergyMeter | None:
    """The energy meter of a card that is loaded and has nothing to do yet, whose power it notes; None without one."""
    from llmcli.measure.energy import open_meter

    meter = open_meter(card)
    if isinstance(meter, str):
        return None
    meter.sample_idle()
    return meter


def model_files(folder: Path) -> dict[str, str]:
    """What tells a model's files from others of the same names: size and time of each that its texts depend on."""
    from llmcli.checkpoint.export_source import SourceState

    files = SourceState.record(folder).files
    return {
        name: f"{state.size} bytes of {datetime.fromtimestamp(state.mtime / 1e9, UTC).isoformat()}"
        for name, state in sorted(files.items())
        if name.endswith((".json", ".jinja", ".model", ".txt", ".safetensors"))
    }


def open_scheduler(runner: Runner, tokenizer: Tokenizer) -> Scheduler:
    """What serves the prompts of a batch."""
    from llmcli.batch.one_by_one import OneByOne

    return OneByOne(runner, tokenizer)


def open_export(
    source: str, destination: Path, options: ExportOptions, *, card: int | None, replace: bool, dry_run: bool
) -> Exporter:
    """Check the source and the destination of an export and plan it; `card` None is the CPU.

    Raises: UsageError, CheckpointError and DeviceError, with their subclasses.
    """
    from llmcli.checkpoint.export import Exporter
    from llmcli.checkpoint.export_destination import refuse_existing, require_text, resolve_destination
    from llmcli.checkpoint.export_plan import plan_export
    from llmcli.checkpoint.export_source import SourceState
    from llmcli.checkpoint.model import open_model

    destination = resolve_destination(destination)  # before anything is downloaded
    if not dry_run:
        refuse_existing(destination, replace=replace)
    folder = model_folder(source)
    state = SourceState.record(folder)
    plan = plan_export(open_model(folder), options, state)
    source_name = source if find_hub_id(source) else folder.resolve().name
    require_text(source_name, "the name of the source")
    if card is None:
        return Exporter(plan, destination, source_name, replace=replace)
    open_quantizer = partial(_open_card_quantizer, card, plan.weights)
    return Exporter(plan, destination, source_name, replace=replace, open_quantizer=open_quantizer)


def _open_card_quantizer(card: int, weights: Sequence[PlannedWeight]) -> CardQuantizer:
    from llmcli.kernels.device import Device
    from llmcli.runners.cuda.quantizer import CardQuantizer

    device = Device.open(card)
    terminal.info(f"quantizing on {device.name} (cuda:{device.index})")
    return CardQuantizer(
        device, weights, on_compile=lambda count: terminal.info(f"compiling {count} kernels for this card, once")
    )


def require_same_tokenizer(first: Session, second: Session) -> None:
    """Refuse two models that cannot be compared token by token.

    Raises: UsageError.
    """
    sizes = [session.model.config.vocab_size for session in (first, second)]
    same_pieces = first.tokenizer.vocab_size == second.tokenizer.vocab_size and all(
        first.tokenizer.piece(token_id) == second.tokenizer.piece(token_id)
        for token_id in range(first.tokenizer.vocab_size)
    )
    if not same_pieces or sizes[0] != sizes[1]:
        raise UsageError(
            f"{first.name} and {second.name} have different vocabularies, so their tokens cannot be compared; "
            "give two versions of one model"
        )


def evaluate_models(
    sessions: list[Session], options: RunnerOptions, text: str, *, window: int, stride: int
) -> tuple[list[Evaluation], Comparison | None]:
    """Perplexity of one model on a text, or of two and how far they are from each other.

    Of two the first is the measure: an int8 KV cache that the options ask for is the second one's.
    """
    from llmcli.measure.evaluate import compare, evaluate

    token_ids = sessions[0].encode_prompt(text).token_ids
    bos_token_id = sessions[0].tokenizer.bos_token_id
    bos_token_ids = [bos_token_id] if bos_token_id is not None and token_ids[0] == bos_token_id else []
    first_options = options if len(sessions) == 1 else options.with_usual_cache
    runner = sessions[0].load_runner(first_options, window)[0]
    others = [session.load_runner(options, window)[0] for session in sessions[1:]]
    terminal.info(f"{len(token_ids)} tokens, {runner.description}{options.note}, windows of {window}")
    with terminal.progress("scoring", unit="tokens") as on_progress:
        if not others:
            return [evaluate(runner, token_ids, stride, bos_token_ids, on_progress)], None
        pair = compare(runner, others[0], token_ids, stride, bos_token_ids, on_progress)
        return [pair.first, pair.second], pair


def evaluate_export(source: str, destination: Path, text: str, options: RunnerOptions) -> None:
    """Measure what quantizing did to a text: `builtin`, or a file. The figures go into the export's cards.

    Raises: UsageError for a text that cannot be read.
    """
    from llmcli.checkpoint.export_files import add_evaluation

    content, name = read_evaluation_text(text)
    sessions = [open_session(source), open_session(str(destination))]
    window = sessions[0].resolve_context(None, EVALUATION_WINDOW)
    (before, after), comparison = evaluate_models(sessions, options, content, window=window, stride=window // 2)
    assert comparison is not None
    add_evaluation(
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
        f"mean KL {comparison.mean_kl:.3g} nats, top-1 agreement {comparison.top1_agreement:.2%}, on {name}"
    )


def read_evaluation_text(choice: str) -> tuple[str, str]:
    """The text of `--eval` and its name: the built-in one, or a file.

    Raises: UsageError for a file that cannot be read.
    """
    if choice == BUILTIN_TEXT:
        path = resource_folder("configs") / "texts" / "stories.txt"
        return path.read_text(encoding="utf-8"), "the built-in stories"
    return read_prompt(None, Path(choice), "--eval"), Path(choice).name


def diff_models(
    sessions: list[Session], options: RunnerOptions, text: str, max_new_tokens: int
) -> tuple[list[DiffToken], Verdict]:
    """Two models in lockstep on one prompt; an int8 KV cache that the options ask for is the second one's."""
    from llmcli.measure.diff import diff, verdict

    prompt = sessions[0].encode_prompt(text)
    context = len(prompt.token_ids) + max_new_tokens
    for session in sessions:
        longest = session.model.config.max_position_embeddings
        session.resolve_max_new_tokens(max_new_tokens, len(prompt.token_ids), longest)
    first = sessions[0].load_runner(options.with_usual_cache, context)[0]
    second = sessions[1].load_runner(options, context)[0]
    terminal.info(f"{sessions[0].name} against {sessions[1].name}: {first.description}{options.note}")
    with terminal.progress("comparing", unit="tokens") as on_progress:
        tokens: list[DiffToken] = []
        for token in diff(first, second, prompt.token_ids, max_new_tokens, sessions[0].eos_token_ids):
            tokens.append(token)
            on_progress(len(tokens), max_new_tokens)
    return tokens, verdict(tokens)
