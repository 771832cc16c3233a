"""What the small JSON files beside a tokenizer declare: tokenizer_config.json, special_tokens_map.json,
added_tokens.json.

Refuses malformed values; every other key of these files is ignored.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcli.errors import TokenizerError


@dataclass(frozen=True)
class AddedToken:
    """A token beside the trained vocabulary; `lstrip` and `rstrip` let it swallow the white space around it."""

    token_id: int
    content: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


@dataclass(frozen=True)
class TokenizerSettings:
    """The declarations of one model folder; the defaults are those of a folder without any of the three files.

    `special_tokens` holds the strings of every token that must never be shown. `legacy` is Hugging Face's word for
    a LLaMA tokenizer that puts a space after each special token and not only at the start of the text.
    """

    bos_token: str | None = None
    eos_token: str | None = None
    add_bos_token: bool | None = None  # None: not said
    add_eos_token: bool = False
    legacy: bool = False
    added_tokens: tuple[AddedToken, ...] = ()
    special_tokens: frozenset[str] = frozenset()


def read_settings(folder: Path) -> TokenizerSettings:
    """Reads the declarations of a model folder; a missing file declares nothing.

    As in transformers, a tokenizer_config.json with `added_tokens_decoder` is complete, and the two older files are
    read only when it has none.

    Raises: TokenizerError, naming the file, for broken JSON or a value of the wrong type.
    Source: transformers 5.23, `PreTrainedTokenizerBase._from_pretrained`.
    """
    config_path = folder / "tokenizer_config.json"
    config = _read_object(config_path)
    is_complete = config.get("added_tokens_decoder") is not None
    token_map_path = folder / "special_tokens_map.json"
    token_map = {} if is_complete else _read_object(token_map_path)

    def named_token(name: str) -> str | None:
        path = token_map_path if name in token_map else config_path
        return _token_string(path, name, token_map.get(name, config.get(name)))

    bos_token, eos_token = named_token("bos_token"), named_token("eos_token")
    special = {token for token in (bos_token, eos_token) if token is not None}
    special |= _additional_special_tokens(config_path, config) | _additional_special_tokens(token_map_path, token_map)

    if is_complete:
        added_tokens = _added_tokens_decoder(config_path, config["added_tokens_decoder"])
    else:
        added_tokens = _added_tokens_file(folder / "added_tokens.json", special)
    return TokenizerSettings(
        bos_token=bos_token,
        eos_token=eos_token,
        add_bos_token=_flag(config_path, config, "add_bos_token"),
        add_eos_token=bool(_flag(config_path, config, "add_eos_token")),
        legacy=bool(_flag(config_path, config, "legacy")),
        added_tokens=added_tokens,
        special_tokens=frozenset(special | {token.content for token in added_tokens if token.special}),
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise TokenizerError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON ({error}); download the file again") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds a {type(value).__name__}, expected a JSON object; download the file again")
    return value


def _flag(path: Path, config: dict[str, Any], name: str) -> bool | None:
    value = config.get(name)
    if not isinstance(value, bool | None):
        raise TokenizerError(f"{name} in {path} is {json.dumps(value)}, expected true, false or null")
    return value


def _token_string(path: Path, name: str, value: Any) -> str | None:
    """A token as these files write it: null, a string, or an object with "content"; an empty string is no token."""
    content = value.get("content") if isinstance(value, dict) else value
    if content is None and not isinstance(value, dict):
        return None
    if not isinstance(content, str):
        expected = 'a string, an object with "content", or null'
        raise TokenizerError(f"{name} in {path} is {json.dumps(value)}, expected {expected}")
    return content or None


def _additional_special_tokens(path: Path, config: dict[str, Any]) -> set[str]:
    tokens: set[str] = set()
    for name in ("additional_special_tokens", "extra_special_tokens"):
        values = config.get(name) or []
        if isinstance(values, dict):  # extra_special_tokens may also map names to tokens
            values = list(values.values())
        if not isinstance(values, list):
            raise TokenizerError(f"{name} in {path} is {json.dumps(values)}, expected a list of tokens")
        tokens.update(token for value in values if (token := _token_string(path, name, value)) is not None)
    return tokens


def _added_tokens_decoder(path: Path, entries: Any) -> tuple[AddedToken, ...]:
    if not isinstance(entries, dict):
        raise TokenizerError(f"added_tokens_decoder in {path} is {json.dumps(entries)}, expected an object")
    tokens = []
    for key, entry in entries.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not (key.isascii() and key.isdigit()) or not isinstance(content, str) or not content:
            expected = 'a token id with an object that has "content"'
            raise TokenizerError(
                f"added_tokens_decoder in {path} holds {json.dumps({key: entry})}, expected {expected}"
            )
        behaviour = {name: bool(entry.get(name)) for name in ("special", "lstrip", "rstrip", "single_word")}
        tokens.append(AddedToken(int(key), content, **behaviour))
    return tuple(tokens)


def _added_tokens_file(path: Path, special: set[str]) -> tuple[AddedToken, ...]:
    tokens = []
    for content, token_id in _read_object(path).items():
        if not isinstance(token_id, int) or token_id < 0 or not content:
            raise TokenizerError(f"{path} holds {json.dumps({content: token_id})}, expected token strings with ids")
        tokens.append(AddedToken(token_id, content, special=content in special))
    return tuple(tokens)
