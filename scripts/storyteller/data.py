"""Writes the training data: documents told, encoded and packed into rows of 1,024 tokens, by many processes.

A row is uint16: the low 15 bits are the token id, the high bit says that the loss leaves this token out. A document
is never cut: rows are filled first-fit from a buffer and padded at the end.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from .corpus import documents
from .tokenizer import Encoder, train_tokenizer

ROW_TOKENS = 1024
SILENT = 0x8000
ID_MASK = 0x7FFF
_BUFFER_DOCUMENTS = 400


def _pack(encoded: list[np.ndarray]) -> np.ndarray:
    """Pack documents into rows, longest first, each into the fullest row that still has room.

    Shapes: result [num_rows, 1024] uint16.
    """
    rows: list[list[np.ndarray]] = []
    by_room: list[list[int]] = [[] for _ in range(ROW_TOKENS + 1)]
    for document in sorted(encoded, key=len, reverse=True):
        size = len(document)
        room = next((room for room in range(size, ROW_TOKENS + 1) if by_room[room]), None)
        if room is None:
            rows.append([])
            index, room = len(rows) - 1, ROW_TOKENS
        else:
            index = by_room[room].pop()
        rows[index].append(document)
        by_room[room - size].append(index)
    packed = np.full((len(rows), ROW_TOKENS), SILENT, dtype=np.uint16)
    for row, parts in zip(packed, rows, strict=True):
        joined = np.concatenate(parts)
        row[: len(joined)] = joined
    return packed


def make_rows(tokenizer: Path, seed: int, shard: int, split: str, num_tokens: int) -> tuple[np.ndarray, int]:
    """Tell, encode and pack at least num_tokens tokens of one shard, in random order of rows; count its documents.

    Shapes: result [num_rows, 1024] uint16.
    """
    encoder = Encoder(tokenizer)
    packed: list[np.ndarray] = []
    waiting: list[np.ndarray] = []
    total = num_documents = 0
    for document in documents(seed, shard, split):
        ids, counts = encoder.encode_document(document, ROW_TOKENS)
        waiting.append(np.array(ids, dtype=np.uint16) | np.where(counts, 0, SILENT).astype(np.uint16))
        total += len(ids)
        num_documents += 1
        if len(waiting) == _BUFFER_DOCUMENTS or total >= num_tokens:
            packed.append(_pack(waiting))
            waiting = []
        if total >= num_tokens:
            break
    rows = np.concatenate(packed)
    np.random.default_rng([seed, shard]).shuffle(rows)
    return rows, num_documents


def _write_shard(out: Path, name: str, *arguments: object) -> int:
    rows, num_documents = make_rows(*arguments)  # type: ignore[arg-type]
    # Training may already be reading the folder: a shard appears whole or not at all.
    np.save(out / f"{name}.part.npy", rows)
    (out / f"{name}.part.npy").rename(out / f"{name}.npy")
    return num_documents


def main() -> None:
    """Write `tokenizer.model`, `val.npy`, the shards of training rows and `manifest.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=float, default=400e6, help="training tokens to write")
    parser.add_argument("--shards", type=int, default=128)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer = arguments.out / "tokenizer.model"
    start = time.time()
    if not tokenizer.exists():
        train_tokenizer(tokenizer)
        print(f"tokenizer after {time.time() - start:.0f} s", flush=True)
    per_shard = int(arguments.tokens / arguments.shards)
    with ProcessPoolExecutor(arguments.workers) as pool:
        jobs = [pool.submit(_write_shard, arguments.out, "val", tokenizer, arguments.seed, 0, "test", 1_000_000)]
        jobs += [
            pool.submit(
                _write_shard, arguments.out, f"train-{shard:04d}", tokenizer, arguments.seed, shard, "train", per_shard
            )
            for shard in range(arguments.shards)
        ]
        num_documents = [job.result() for job in jobs]
    # With this the text can be told again, word for word, without keeping it.
    (arguments.out / "manifest.json").write_text(json.dumps({"seed": arguments.seed, "documents": num_documents[1:]}))
    print(f"{arguments.shards} shards of {per_shard:,} tokens after {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
