"""Finds the tokenizer of a model folder and loads it.

Refuses files of other kinds by name: Git LFS pointers, tiktoken text files, empty files.
"""

import os
import re
from pathlib import Path

from llmcli.errors import TokenizerError, foreign_errors_explained
from llmcli.reading import GIT_LFS_START, TOKENIZER_MODEL
from llmcli.tokenizer.base import Tokenizer, read_settings


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load tokenizer.json if the folder has one, else tokenizer.model, with the settings next to it.

    Raises: TokenizerError if both are missing, or if a file is damaged or of an unknown kind.
    """
    json_path, model_path = folder / "tokenizer.json", folder / "tokenizer.model"
    # A broken link counts as present, so that its name is reported.
    if os.path.lexists(json_path):
        content = _read(json_path)
        from llmcli.tokenizer.huggingface import HuggingFaceTokenizer

        with foreign_errors_explained(str(json_path), TokenizerError):
            return HuggingFaceTokenizer(json_path, content, read_settings(folder))
    if os.path.lexists(model_path):
        content = _read(model_path)
        from llmcli.tokenizer.spm import SentencePieceTokenizer

        with foreign_errors_explained(str(model_path), TokenizerError):
            return SentencePieceTokenizer(model_path, content, read_settings(folder))
    if not folder.is_dir():
        raise TokenizerError(f"model folder {folder} {'is a file' if folder.exists() else 'does not exist'}")
    raise TokenizerError(
        f"no tokenizer in {folder}: looked for tokenizer.json and tokenizer.model; "
        f"download one of them from the model's page into this folder"
    )


def _read(path: Path) -> bytes:
    """The content of the file. Raises: TokenizerError if it cannot be read or is a well-known wrong kind of file."""
    content = TOKENIZER_MODEL.read_bytes(path)
    head = content[:1024]
    if not head:
        raise TokenizerError(f"{path} is empty; download the file again")
    if head.startswith(GIT_LFS_START):
        raise TokenizerError(f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in {path.parent}")
    if re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", head):  # lines of base64 and rank
        raise TokenizerError(
            f"{path} is a tiktoken file, as Meta ships it with Llama 3, expected a SentencePiece model; "
            f"put the tokenizer.json of the same model into {path.parent}"
        )
    return content
