"""The small files of an export that this program writes: config, index, and the quality card as JSON and as text."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmcli import __version__
from llmcli.checkpoint.export_options import ExportOptions
from llmcli.checkpoint.export_plan import ExportPlan
from llmcli.checkpoint.folder import CARD_NAME, CONFIG_NAME, INDEX_NAME, MODEL_CARD_NAME
from llmcli.errors import CheckpointError
from llmcli.quantization.rounding import TensorQuality
from llmcli.quantization.schemes import WeightScheme
from llmcli.reading import QUALITY_CARD

CARD_FORMAT_VERSION = 1

_NUM_WORST = 5


def index_json(plan: ExportPlan) -> dict[str, Any]:
    """The index of a sharded export, as Hugging Face writes it."""
    weight_map = {
        tensor.name: shard.file_name for shard in plan.shards for weight in shard.weights for tensor in weight.outputs
    }
    return {"metadata": {"total_size": plan.total.bytes_after}, "weight_map": dict(sorted(weight_map.items()))}


def small_files(
    plan: ExportPlan, qualities: Mapping[str, TensorQuality], source_name: str, name: str
) -> dict[str, str]:
    """The text of every file that is written rather than copied, config.json last."""
    if plan.options is None:
        files = {MODEL_CARD_NAME: conversion_card(plan, source_name, name)}
    else:
        card = quality_card(plan, plan.options, qualities, source_name)
        files = {CARD_NAME: _json(card), MODEL_CARD_NAME: model_card(plan, plan.options, qualities, source_name, name)}
    if len(plan.shards) > 1:
        files[INDEX_NAME] = _json(index_json(plan))
    return {**files, CONFIG_NAME: _json(plan.config_json)}


def quality_card(
    plan: ExportPlan, options: ExportOptions, qualities: Mapping[str, TensorQuality], source_name: str
) -> dict[str, Any]:
    """Choices, sizes and errors as JSON.

    Units: sizes in bytes; errors relative root mean squares, as `TensorQuality` has them.
    """
    total = plan.total
    return {
        "format_version": CARD_FORMAT_VERSION,
        "llmcli_version": __version__,
        "source": source_name,
        "num_bits": options.scheme.num_bits,
        "group_size": options.scheme.group_size,
        "symmetric": options.scheme.is_symmetric,
        "head_bits": options.head_bits,
        "skip": list(options.skip),
        "adapters": [
            {"name": adapter.name, "weight": adapter.weight, "sha256": adapter.sha256}
            for adapter in plan.model.adapters
        ],
        "kept_layers": list(plan.skipped),
        "channel_layers": list(plan.channel_layers),
        "bytes_before": total.bytes_before,
        "bytes_after": total.bytes_after,
        "sizes": {kind: asdict(sizes) for kind, sizes in plan.sizes.items()},
        "tensors": {
            weight.module: {"scheme": str(weight.scheme), **asdict(qualities[weight.module])}
            for weight in plan.weights
            if weight.scheme is not None
        },
    }


def model_card(
    plan: ExportPlan, options: ExportOptions, qualities: Mapping[str, TensorQuality], source_name: str, name: str
) -> str:
    """README.md of the export."""
    total = plan.total
    head = f"int{options.head_bits}" if options.head_bits else "as in the source"
    if plan.unties_head:
        head += ", no longer shared with the embedding"
    lines = [
        *_heading(name),
        f"{source_name} with its linear layers quantized by llmcli {__version__}, without calibration, "
        "in the compressed-tensors format `pack-quantized`.",
        "",
        "| | |",
        "|---|---|",
        f"| linear layers | {options.scheme} |",
        f"| output head | {head} |",
        "| embedding, norms, biases | as in the source |",
        f"| weights | {total.bytes_before / 1e6:,.1f} MB before, {total.bytes_after / 1e6:,.1f} MB now |",
    ]
    lines += _list_row("LoRA adapters added before", [adapter.shown_name for adapter in plan.model.adapters])
    lines += _list_row("one scale a row, since the group does not divide the input size", plan.channel_layers)
    lines += _list_row("kept as in the source", plan.skipped)
    lines += ["", "## Loading", "", *_loading(plan), "", "## Quantization error", ""]
    lines += [
        "Root mean square of the change of the weights, relative to the weights. All layers: `quantization.json`.",
        "",
        "| layers | mean error | largest | where | worst row there |",
        "|---|---|---|---|---|",
    ]
    by_type: dict[str, list[str]] = {}
    for module in qualities:
        by_type.setdefault(module.rsplit(".", 1)[-1], []).append(module)
    for layer_type, modules in by_type.items():
        worst = max(modules, key=lambda module: qualities[module].relative_rms_error)
        mean = sum(qualities[module].relative_rms_error for module in modules) / len(modules)
        lines.append(f"| {layer_type} | {mean:.3%} | {_row(worst, qualities[worst])} |")
    lines += ["", f"The {_NUM_WORST} worst:", "", "| layer | error | worst row |", "|---|---|---|"]
    for module in worst_tensors(qualities)[:_NUM_WORST]:
        quality = qualities[module]
        error = f"{quality.worst_row_error:.3%} (row {quality.worst_row})"
        lines.append(f"| {module} | {quality.relative_rms_error:.3%} | {error} |")
    return "\n".join(lines) + "\n"


def conversion_card(plan: ExportPlan, source_name: str, name: str) -> str:
    """README.md of a conversion."""
    formats = sorted({layer.format.name for layer in plan.model.tensors.packed.values()})
    lines = [
        *_heading(name),
        f"{source_name}, converted by llmcli {__version__} from {' and '.join(formats)} into the compressed-tensors "
        "format `pack-quantized`. Codes, scales and zero points are those of the source; nothing was quantized again.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {count} layers | {scheme} |" for scheme, count in _schemes(plan).items()),
    ]
    lines += _list_row("kept as in the source", plan.skipped)
    return "\n".join([*lines, "", "## Loading", "", *_loading(plan)]) + "\n"


def _heading(name: str) -> list[str]:
    return ["---", "library_name: transformers", "tags: [compressed-tensors, llmcli]", "---", f"# {name}", ""]


def _schemes(plan: ExportPlan) -> Mapping[WeightScheme, int]:
    """How many layers have each scheme."""
    return Counter(weight.scheme for weight in plan.weights if weight.scheme is not None)


def add_evaluation(folder: Path, evaluation: Mapping[str, Any]) -> None:
    """Put what an evaluation measured into both cards of a finished export.

    `evaluation` has text, num_tokens, window, stride, perplexity_before, perplexity_after, mean_kl, top1_agreement.
    Raises: OSError.
    """
    card = json.loads((folder / CARD_NAME).read_text(encoding="utf-8"))
    _replace(folder / CARD_NAME, _json({**card, "evaluation": dict(evaluation)}))
    model_card = (folder / MODEL_CARD_NAME).read_text(encoding="utf-8")
    lines = [
        "",
        "## Effect on text",
        "",
        f"Measured on {evaluation['num_tokens']} tokens of {evaluation['text']}, windows of {evaluation['window']}, "
        f"stride {evaluation['stride']}, in float32.",
        "",
        "| | before | now |",
        "|---|---|---|",
        f"| perplexity | {evaluation['perplexity_before']:.4f} | {evaluation['perplexity_after']:.4f} |",
        f"| mean KL divergence, nats per token | | {evaluation['mean_kl']:.3g} |",
        f"| same likeliest token | | {evaluation['top1_agreement']:.2%} |",
    ]
    _replace(folder / MODEL_CARD_NAME, model_card + "\n".join(lines) + "\n")


def _replace(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def read_card(folder: Path) -> Mapping[str, Any] | None:
    """The quality card of an export by this program, or None if there is none or it is damaged."""
    try:
        card = QUALITY_CARD.read_json_object(folder / CARD_NAME)
    except CheckpointError:
        return None
    return card if _is_card(card) else None


def _is_card(card: Mapping[str, Any]) -> bool:
    """Whether a card has every field that is shown, with the right types."""
    tensors, evaluation = card.get("tensors"), card.get("evaluation")
    return (
        card.get("format_version") == CARD_FORMAT_VERSION
        and isinstance(card.get("source"), str)
        and isinstance(tensors, dict)
        and bool(tensors)
        and all(isinstance(tensor, dict) and _are_numbers(tensor, "relative_rms_error") for tensor in tensors.values())
        and (evaluation is None or (isinstance(evaluation, dict) and _is_evaluation(evaluation)))
    )


def _is_evaluation(evaluation: Mapping[str, Any]) -> bool:
    figures = ("perplexity_before", "perplexity_after", "mean_kl", "top1_agreement")
    return isinstance(evaluation.get("text"), str) and _are_numbers(evaluation, *figures)


def _are_numbers(values: Mapping[str, Any], *names: str) -> bool:
    return all(isinstance(values.get(name), float | int) for name in names)


def worst_tensors(qualities: Mapping[str, TensorQuality]) -> list[str]:
    """Module names, the largest error first."""
    return sorted(qualities, key=lambda module: -qualities[module].relative_rms_error)


def _loading(plan: ExportPlan) -> list[str]:
    run = ["- llmcli: `llmcli generate -m FOLDER`"]
    if plan.stores_order:
        run.append("- transformers with compressed-tensors 0.15.0: `AutoModelForCausalLM.from_pretrained(FOLDER)`")
    elif all(scheme.is_symmetric for scheme in _schemes(plan)):
        run.append("- transformers with compressed-tensors installed: `AutoModelForCausalLM.from_pretrained(FOLDER)`")
    else:
        run.append(
            "- transformers with compressed-tensors installed: `AutoModelForCausalLM.from_pretrained(FOLDER, "
            "quantization_config=CompressedTensorsConfig(dequantize=True))`, since it loads zero points in no other way"
        )
    return run + [f"- {concern}" for concern in plan.concerns or ("vLLM: in its format, but not run with it",)]


def _list_row(what: str, names: Iterable[str]) -> list[str]:
    listed = ", ".join(names)
    return [f"| {what} | {listed} |"] if listed else []


def _row(module: str, quality: TensorQuality) -> str:
    return f"{quality.relative_rms_error:.3%} | {module} | {quality.worst_row_error:.3%}"


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
