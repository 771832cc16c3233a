"""Writes held-out stories as one text, with the tokens that stood between them in training: for `llmcli quantize`."""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

from .story import tell


def held_out_text(num_stories: int) -> str:
    """Stories one after another; a tokenizer adds the first <s>."""
    random = Random("held-out text")
    return "".join(f"{'<s>' if index else ''}{tell(random, 'test').text}</s>" for index in range(num_stories))


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stories", type=int, default=60)
    arguments = parser.parse_args()
    arguments.out.write_text(held_out_text(arguments.stories), encoding="utf-8")


if __name__ == "__main__":
    main()
