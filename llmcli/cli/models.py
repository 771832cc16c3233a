"""`llmcli models`, `pull`, `presets`, `info` and `tokenize`: which models and presets there are, and what one holds."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer
from rich.filesize import decimal

from llmcli.checkpoint.hub_library import find_hub_id
from llmcli.checkpoint.ollama_names import hub_hint
from llmcli.cli import lazy, shared
from llmcli.cli.command import argument, command_group, option
from llmcli.cli.completion import complete_hub_id
from llmcli.cli.prompt import read_prompt
from llmcli.cli.session import fetch_model, model_folder, open_session, warn_of
from llmcli.cli.settings import change_alias, read_settings
from llmcli.cli.tables import aligned_lines
from llmcli.cli.terminal import fact_lines, terminal, visible
from llmcli.cli.units import counted, divergence, size
from llmcli.errors import UsageError
from llmcli.resources import BUILT_IN_MODELS, user_presets_folder
from llmcli.tokenizer.base import decode as decode_text


def pull(
    *,
    name: str = argument(..., "Hub id: ORG/NAME or ORG/NAME@REVISION.", metavar="ID", complete=complete_hub_id),
    update: bool = option(False, "Look for a newer commit even if the model is in the cache."),
    messages: shared.MessageOptions,
) -> None:
    """Download a model into the hub's cache and print its folder.

    After a stop, files that are whole are not downloaded again.

    Examples:

    llmcli pull HuggingFaceTB/SmolLM2-135M

    llmcli pull HuggingFaceTB/SmolLM2-135M@main --update
    """
    if find_hub_id(name) is None:
        raise UsageError(f"{name!r} is not of the form ORG/NAME or ORG/NAME@REVISION{hub_hint(name)}")
    terminal.write(f"{fetch_model(name, update)}\n")


def presets(
    *,
    json_: bool = option(False, "Print one JSON object instead of a table."),
    debug: bool = shared.debug_option(),
) -> None:
    """List the presets for --preset, built-in and your own.

    Examples:

    llmcli presets

    llmcli generate "Once upon a time" --preset story
    """
    found = lazy.presets.list_presets()
    if json_:
        terminal.write_json(
            {
                preset.name: {
                    "description": preset.description,
                    "sampling": dict(preset.sampling),
                    "path": str(preset.path),
                }
                for preset in found
            }
        )
        return
    for preset in found:
        values = "  ".join(f"{name} {value}" for name, value in preset.sampling.items())
        lines = (("", preset.description), ("", values), ("", str(preset.path)))
        terminal.write(f"{preset.name}\n{fact_lines(lines, 2, sys.stdout)}")
    terminal.info(f"your own presets go to {user_presets_folder()}")


def list_models(
    *,
    json_: bool = option(False, "Print a JSON array instead of a table."),
    debug: bool = shared.debug_option(),
) -> None:
    """List the models in the hub's cache, whichever program downloaded them.

    Examples:

    llmcli models list

    llmcli models list --json
    """
    found = lazy.hub.list_cached_models()
    for line in found.unreadable:
        terminal.warn(line)
    if json_:
        terminal.write_json(
            [
                {
                    "id": model.repo_id,
                    "revision": model.commit,
                    "refs": list(model.refs),
                    "size_bytes": model.size_bytes,
                    "last_used": datetime.fromtimestamp(model.last_used, UTC).isoformat(timespec="seconds"),
                    "complete": model.is_complete,
                    "model_type": model.model_type,
                    "folder": str(model.folder),
                }
                for model in found.models
            ]
        )
        return
    if not found.models:
        terminal.info(f"no models in {found.cache}")
        return
    rows = [("ID", "REVISION", "SIZE", "LAST USED", "TYPE", "STATE")]
    for model in found.models:
        rows.append(
            (
                model.repo_id,
                ", ".join(model.refs) or model.commit,
                decimal(model.size_bytes),
                f"{datetime.fromtimestamp(model.last_used):%Y-%m-%d}",
                model.model_type or "-",
                "complete" if model.is_complete else "incomplete",
            )
        )
    terminal.write("".join(f"{line}\n" for line in aligned_lines(rows, "<" * len(rows[0]))))


def remove_model(
    *,
    name: str = argument(
        ..., "Hub id; with @REVISION, remove only that branch, tag or commit.", metavar="ID", complete=complete_hub_id
    ),
    yes: bool = option(False, "Do not ask for confirmation.", "-y"),
    messages: shared.MessageOptions,
) -> None:
    """Remove a model from the hub's cache.

    Examples:

    llmcli models rm HuggingFaceTB/SmolLM2-135M

    llmcli models rm HuggingFaceTB/SmolLM2-135M@main --yes
    """
    hub_id = find_hub_id(name)
    if hub_id is None:
        raise UsageError(f"{name!r} is not of the form ORG/NAME; `llmcli models list` shows the models in the cache")
    removal = lazy.hub.plan_removal(hub_id)
    size = decimal(removal.freed_bytes)
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(f"cannot ask whether to remove {hub_id} ({size}): no terminal; add --yes")
        count = len(removal.commits)
        if not typer.confirm(visible(f"Remove {hub_id} ({count} revision{'s' * (count > 1)}, {size})?"), err=True):
            terminal.info("nothing removed")
            return
    removal.execute()
    terminal.info(f"removed {hub_id}, {size} freed")


def alias(
    *,
    name: str | None = argument(None, "The alias; without one, list all."),
    model: str | None = argument(None, "The model folder or hub id that it stands for."),
    remove: bool = option(False, "Remove the alias NAME."),
    messages: shared.MessageOptions,
) -> None:
    """Give a model a short name, usable wherever a model is named.

    Examples:

    llmcli models alias smol HuggingFaceTB/SmolLM2-135M

    llmcli models alias smol --remove
    """
    aliases = read_settings().aliases
    if name is None:
        terminal.write("".join(f"{line}\n" for line in aligned_lines([*aliases.items()], "<<")))
    elif (model is None) != remove:
        raise UsageError(f"give the model that {name} stands for, or --remove")
    elif model is None:
        if name not in aliases:
            raise UsageError(f"there is no alias {name!r}; `llmcli models alias` lists them")
        terminal.info(f"removed {name} from {change_alias(name, None)}")
    elif os.path.lexists(name):
        raise UsageError(f"{name!r} is a file or folder here, which would be meant; choose another alias")
    else:
        is_path = os.path.exists(model)
        target = os.path.abspath(model) if is_path else model  # it is meant from every folder
        is_known = target in (name, *aliases, *BUILT_IN_MODELS, *lazy.random_weights.shape_names())
        if not (is_path or is_known or find_hub_id(model)):
            raise UsageError(f"{model!r} is neither a model folder nor a hub id")
        terminal.info(f"{name} stands for {target} in {change_alias(name, target)}")


models_app = command_group(
    "List or remove downloaded models, and give them aliases.",
    {"list": list_models, "rm": remove_model, "alias": alias},
)


MAX_DIGITS = 20


def tokenize(
    model: str | None = shared.model_name_option(),
    text: str | None = argument(None, "Text to tokenize; without it, or with `-`, read standard input."),
    file: Path | None = option(None, "Read the text from a file.", "-f"),
    decode: bool = option(False, "Read TEXT as token ids and print their text."),
    json_: bool = option(False, "Print one JSON object: token_ids, pieces, text."),
    debug: bool = shared.debug_option(),
) -> None:
    """Show the tokens of a text: each id and its piece.

    Examples:

    llmcli tokenize "Once upon a time" -m my-model

    llmcli tokenize --decode "1 9038 2501" -m my-model
    """
    content = read_prompt(text, file)
    tokenizer = lazy.tokenizer_load.load_tokenizer(model_folder(shared.model_or_default(model)))
    token_ids = _parse_ids(content, tokenizer.vocab_size) if decode else tokenizer.encode(content)
    pieces = [tokenizer.piece(token_id) for token_id in token_ids]
    if json_:
        terminal.write_json(
            {"token_ids": token_ids, "pieces": pieces, "text": decode_text(tokenizer, token_ids, at_start=True)}
        )
    elif decode:
        terminal.write(f"{decode_text(tokenizer, token_ids, at_start=True)}\n")
    else:
        width = len(str(max(token_ids, default=0)))
        for token_id, piece in zip(token_ids, pieces, strict=True):
            shown = piece if piece.isprintable() else ascii(piece)[1:-1]
            terminal.write(f"{token_id:>{width}}  {shown}\n")
        terminal.info(f"{len(token_ids)} tokens")


def _parse_ids(text: str, vocab_size: int) -> list[int]:
    """Token ids out of text such as `1 2 3`, `1,2,3` or `[1, 2, 3]`.

    Raises: UsageError for anything else, or an id outside the vocabulary.
    """
    words = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    for word in words:
        if not (word.isascii() and word.isdecimal() and len(word) < MAX_DIGITS) or int(word) >= vocab_size:
            raise UsageError(
                f"{word[:MAX_DIGITS]!r} is not a token id of this tokenizer, "
                f"expected numbers from 0 to {vocab_size - 1}"
            )
    return [int(word) for word in words]


def info(
    *,
    names: shared.ModelNames,
    context: int | None = shared.context_option(),
    json_: bool = option(False, "Print one JSON object instead of a table."),
    debug: bool = shared.debug_option(),
) -> None:
    """Show a model's shape, memory needs and sampling defaults. Reads no weights.

    Examples:

    llmcli info my-model

    llmcli info my-model --context 32768 --json
    """
    facts = _inspect(names.chosen, context)
    if json_:
        terminal.write_json(dataclasses.asdict(facts))
    else:
        terminal.write(fact_lines(_rows(facts), 28, sys.stdout))


def _inspect(name: str | None, context: int | None) -> lazy.info.ModelInfo:
    """Facts about a model. Raises: LLMCliError and its subclasses."""
    session = open_session(name)
    warn_of(session.model, session.name)
    sampling = session.resolve_sampling({}, None)
    max_seq_len = session.resolve_context(context)
    try:
        template = lazy.chat_encoding.load_chat_template(session.model.checkpoint.folder, session.tokenizer).origin
    except UsageError:  # there is none
        template = None
    return lazy.info.inspect_model(
        session.model, session.tokenizer, session.eos_token_ids, sampling, template, max_seq_len
    )


def _rows(facts: lazy.info.ModelInfo) -> list[tuple[str, str]]:
    """The table; a name of spaces continues the row above."""
    shape = facts.shape
    heads = f"{shape['num_attention_heads']} heads over {shape['num_key_value_heads']} key-value heads"
    dtypes = ", ".join(f"{dtype} {size(num_bytes)}" for dtype, num_bytes in facts.bytes_by_dtype.items())
    rows = [
        ("model", facts.folder),
        ("model type", facts.model_type),
        ("layers", f"{shape['num_hidden_layers']}, hidden {shape['hidden_size']}, MLP {shape['intermediate_size']}"),
        ("attention", f"{heads} of {shape['head_dim']}"),
        ("rotary", f"{shape['rope_type']}, theta {shape['rope_theta']:g}"),
        ("context limit", f"{shape['max_position_embeddings']} tokens"),
    ]
    num_layers = f"of {shape['num_hidden_layers']} layers"
    if shape["num_layers_without_rope"]:
        rows.append(("without rotary", f"{shape['num_layers_without_rope']} {num_layers}"))
    if shape["num_sliding_layers"]:
        window = f"{shape['sliding_window']} tokens"
        rows.append(("sliding window", f"{window}, in {shape['num_sliding_layers']} {num_layers}"))
    for scheme, count in facts.quantization.items():
        rows.append(("quantized", f"{count} layers as {scheme}"))
    if facts.quality_card is not None:
        rows += _quality_rows(facts.quality_card)
    rows += [
        ("parameters", f"{facts.num_parameters:,} in {facts.num_tensors} tensors, {counted(facts.num_shards, 'file')}"),
        ("stored as", dtypes + (", head shared with the embedding" if shape["tied_head"] else "")),
        ("read per token", f"{size(facts.decode_bytes_per_token)} of weights as stored"),
        ("", f"+ {size(facts.kv_bytes_per_token)} for each token of context (16-bit KV cache)"),
    ]
    for precision, need in facts.memory.items():
        rows.append((f"memory, {precision}", _memory_text(need.weights_bytes, need.kv_cache_bytes, facts.context)))
    if facts.num_parameters < lazy.memory.SMALL_PARAMETERS:
        cache_bytes = facts.memory["float32"].kv_cache_bytes
        rows.append(("memory, numpy", _memory_text(4 * facts.num_parameters, cache_bytes, facts.context)))
    eos = ", ".join(f"{piece} ({token_id})" for token_id, piece in facts.eos.items())
    rows += [
        ("vocabulary", f"{facts.vocab_size} tokens, {facts.num_special_tokens} of them special"),
        ("begins with", facts.bos or "nothing: no BOS token"),
        ("ends with", eos or "nothing: no end-of-text token"),
        ("chat template", facts.chat_template or "none"),
    ]
    for name, (value, source) in facts.sampling.items():
        text = value if isinstance(value, str) else f"{value:g}"
        rows.append((name, f"{text} ({source})"))
    return rows


def _memory_text(weight_bytes: int, cache_bytes: int, context: int) -> str:
    parts = f"weights {size(weight_bytes)} + KV cache {size(cache_bytes)}"
    return f"{size(weight_bytes + cache_bytes)} at context {context}: {parts}"


def _quality_rows(card: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the export noted of its own errors."""
    tensors = card["tensors"]
    worst = max(tensors, key=lambda name: tensors[name]["relative_rms_error"])
    mean = sum(tensor["relative_rms_error"] for tensor in tensors.values()) / len(tensors)
    rows = [
        ("quantized from", card["source"]),
        ("error of weights", f"mean {mean:.2%}, largest {tensors[worst]['relative_rms_error']:.2%} in {worst}"),
    ]
    if evaluation := card.get("evaluation"):
        before, after = evaluation["perplexity_before"], evaluation["perplexity_after"]
        rows += [
            ("perplexity", f"{before:.4f} before, {after:.4f} now, on {evaluation['text']}"),
            (
                "",
                f"mean KL {divergence(evaluation['mean_kl'])} nats, top-1 agreement {evaluation['top1_agreement']:.2%}",
            ),
        ]
    return rows
