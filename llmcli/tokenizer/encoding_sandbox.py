"""The program of the child process that encodes with a tokenizer.json whose steps are not known to be quick.

Runs the `tokenizers` library and nothing else; its time is bounded by the parent. Only the child imports this module.
"""

from typing import Any

import tokenizers

from llmcli.tokenizer.sandbox import printable, serve

MEMORY_LIMIT_MB = 2048  # a vocabulary of 256 thousand takes 300 MB


def main() -> None:
    """Answer `{"document": ..., "added_tokens": [...]}` once, and then `{"text": ..., ...}` with token ids."""
    loaded: dict[str, tokenizers.Tokenizer] = {}

    def answer(request: dict[str, Any]) -> list[int]:
        if "document" in request:
            loaded["tokenizer"] = tokenizers.Tokenizer.from_str(request["document"])
            loaded["tokenizer"].add_tokens([tokenizers.AddedToken(**token) for token in request["added_tokens"]])
            return []
        loaded["tokenizer"].encode_special_tokens = not request["parse_special_tokens"]
        encoding = loaded["tokenizer"].encode(request["text"], add_special_tokens=request["add_special_tokens"])
        return list(encoding.ids)

    serve(answer, lambda error: printable(str(error)) or type(error).__name__, MEMORY_LIMIT_MB)
