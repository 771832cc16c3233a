"""Writes the training data: documents told, encoded and packed into rows of 1,024 tokens, by many processes.

A row is uint16: the low 15 bits are the token id, the high bit says that the loss leaves this token out. A row begins
with the beginning of a document; the last document of a row is cut, since a beginning can be learned without its end.
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
# Training waits for them, and uses a part each time.
HELD_OUT_TOKENS = 500_000


def _pack(encoded: list[np.ndarray]) -> np.ndarray:
    """Pack documents into rows in their order; what does not fit at the end of a row is left out.

    Shapes: result [num_rows, 1024] uint16.
    """
    rows: list[np.ndarray] = []
    row, room = [], ROW_TOKENS
    for document in encoded:
        row.append(document[:room])
        room -= len(row[-1])
        if room == 0:
            rows.append(np.concatenate(row))
            row, room = [], ROW_TOKENS
    if row:
        rows.append(np.concatenate([*row, np.full(room, SILENT, dtype=np.uint16)]))
    return np.stack(rows)


def make_rows(tokenizer: Path, seed: int, shard: int, split: str, num_tokens: int) -> tuple[np.ndarray, int]:
    """Generate, encode and pack at least num_tokens tokens of one shard, in random order of rows; count its documents.

    Shapes: result [num_rows, 1024] uint16.
    """
    encoder = Encoder(tokenizer, seed * 100_000 + shard)
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
        jobs = [pool.submit(_write_shard, arguments.out, "val", tokenizer, arguments.seed, 0, "test", HELD_OUT_TOKENS)]
        jobs += [
            pool.submit(
                _write_shard, arguments.out, f"train-{shard:04d}", tokenizer, arguments.seed, shard, "train", per_shard
            )
            for shard in range(arguments.shards)
        ]
        num_documents = [job.result() for job in jobs]
    # With this the text can be generated again, word for word, without storing it.
    (arguments.out / "manifest.json").write_text(json.dumps({"seed": arguments.seed, "documents": num_documents[1:]}))
    print(f"{arguments.shards} shards of {per_shard:,} tokens after {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
