"""Writes the model card: facts from the folder, figures from an examination, and what the model itself tells."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .evaluate import CHECKS, CRITERIA
from .told import refresh

TEMPLATE = Path(__file__).with_name("card.md")
CARD_NAME = "README.md"
MAX_CHANGE = 0.5  # per cent of perplexity


def _figure_rows(examination: dict[str, Any], evaluation: dict[str, Any]) -> str:
    figures = examination["figures"]
    rows = []
    for name, meaning, wanted in CRITERIA:
        if name in figures:
            outside = f"{figures[f'outside the grammar: {name}']:.1f} %" if name in CHECKS else ""
            rows.append(f"| {meaning} | {figures[name]:.1f} % | {wanted:g} % | {outside} |")
    before, after = evaluation["perplexity_before"], evaluation["perplexity_after"]
    change = f"{after / before - 1:+.2%}".replace("%", " %")
    rows.append(
        f"| perplexity on held-out text, 16-bit and int8 | {before:.4f} and {after:.4f}: {change} "
        f"| within {MAX_CHANGE} % | |"
    )
    return "\n".join(rows)


def _closest_sentence(examination: dict[str, Any]) -> str:
    figures, counts = examination["figures"], examination["counts"]
    if "no copy" not in figures:
        return ""
    return (
        f"To look for copies all {counts['training documents']:,} training documents were told again: of no story "
        f"one of them has more than {figures['most of a story that one training story has']:.0f} % of the sentences.\n"
    )


def facts_of(folder: Path, examination: dict[str, Any]) -> dict[str, object]:
    """What the template's slots hold."""
    config = json.loads((folder / "config.json").read_text())
    quantization = json.loads((folder / "quantization.json").read_text())
    errors = [tensor["relative_rms_error"] for tensor in quantization["tensors"].values()]
    counts = examination["counts"]
    first = examination["seed"]
    return {
        "num_parameters": f"{_num_parameters(config) / 1e6:.0f}",
        "shape": (
            f"{config['num_hidden_layers']} layers, hidden {config['hidden_size']}, MLP {config['intermediate_size']}, "
            f"{config['num_attention_heads']} heads over {config['num_key_value_heads']} key-value heads, "
            "head tied to the embedding"
        ),
        "vocab_size": f"{config['vocab_size']:,}",
        "context": f"{config['max_position_embeddings']:,}",
        "group_size": quantization["group_size"],
        "megabytes": f"{(folder / 'model.safetensors').stat().st_size / 1e6:.1f}",
        "mean_error": f"{sum(errors) / len(errors):.2%}".replace("%", " %"),
        "largest_error": f"{max(errors):.2%}".replace("%", " %"),
        "preset": examination["preset"],
        "seeds": f"seeds {first} to {first + counts['stories'] - 1}",
        "figures": _figure_rows(examination, quantization["evaluation"]),
        "closest": _closest_sentence(examination),
        **{name.replace(" ", "_"): count for name, count in counts.items()},
    }


def _num_parameters(config: dict[str, Any]) -> int:
    """Weights of the architecture; the tied head counts once."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads = 2 * config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    layer = hidden * (heads * config["head_dim"] + 3 * config["intermediate_size"] + 2)
    return config["vocab_size"] * hidden + layers * layer + hidden


def write_card(folder: Path, examination: dict[str, Any]) -> None:
    """Write README.md into a model folder, its stories told by the model in it."""
    text = TEMPLATE.read_text(encoding="utf-8").format(**facts_of(folder, examination))
    (folder / CARD_NAME).write_text(refresh(text, model=str(folder)), encoding="utf-8")


def main() -> None:
    """Read the command line and write the card."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="an export of `llmcli quantize --eval`")
    parser.add_argument("--evaluation", type=Path, required=True, help="what scripts/storyteller/evaluate wrote")
    arguments = parser.parse_args()
    write_card(arguments.model, json.loads(arguments.evaluation.read_text()))


if __name__ == "__main__":
    main()
