"""Trains the storyteller on rows that `storyteller.data` wrote, within a limit of minutes, resumable.

Rows live on the device as a whole; shards that appear while training runs are taken in. Weights are float32, the
arithmetic bfloat16 where the device has it. The learning rate follows the share of training time that has passed.
`checkpoint.pt` is the end of the run, to go on from; `best.pt` holds the weights of the best held-out loss, to export.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from .curve import write_curve
from .data import ID_MASK, SILENT
from .model import Llama, Shape
from .tokenizer import BOS_ID


class RowPool:
    """Training rows on the device, drawn without repeats within an epoch of what is there."""

    def __init__(self, folder: Path, device: torch.device, seed: int) -> None:
        self.folder, self.device = folder, device
        self.rows = torch.empty(0, 0, dtype=torch.int32)
        self._taken: set[str] = set()
        self._random = torch.Generator().manual_seed(seed)
        self._order = torch.empty(0, dtype=torch.int64)
        self._next = 0

    def take_new_shards(self) -> None:
        """Load the shards that have appeared since the last call."""
        paths = [path for path in sorted(self.folder.glob("train-????.npy")) if path.name not in self._taken]
        if not paths:
            return
        # int16 holds the bits of uint16, which torch cannot index on every device.
        fresh = [torch.from_numpy(np.load(path).view(np.int16)).to(self.device) for path in paths]
        self.rows = torch.cat([self.rows, *fresh] if self.rows.numel() else fresh)
        self._taken.update(path.name for path in paths)
        self._order = torch.randperm(len(self.rows), generator=self._random)
        self._next = 0

    def next_batch(self, num_rows: int) -> Tensor:
        """Rows of the next batch: [num_rows, 1024] int16."""
        if self._next + num_rows > len(self._order):
            self._order = torch.randperm(len(self.rows), generator=self._random)
            self._next = 0
        picked = self._order[self._next : self._next + num_rows].to(self.device)
        self._next += num_rows
        return self.rows[picked]


def split_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets of rows; a target that the loss leaves out is -100.

    Shapes: rows [num_rows, 1024] int16; results [num_rows, 1024] int64.
    """
    bits = rows.long() & 0xFFFF
    token_ids = bits & ID_MASK
    targets = torch.full_like(token_ids, -100)
    targets[:, :-1] = torch.where(bits[:, 1:] & SILENT > 0, -100, token_ids[:, 1:])
    return token_ids, targets


def document_mask(token_ids: Tensor) -> Tensor | BlockMask:
    """A mask that keeps each document of a row to itself: a block mask on CUDA, a dense one elsewhere."""
    documents = (token_ids == BOS_ID).cumsum(-1)  # [num_rows, num_tokens]
    num_rows, num_tokens = token_ids.shape
    if token_ids.is_cuda:

        def is_visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (documents[row, query] == documents[row, key])

        return create_block_mask(
            is_visible, num_rows, None, num_tokens, num_tokens, device=str(token_ids.device), _compile=True
        )
    causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=token_ids.device).tril()
    return (causal & (documents[:, :, None] == documents[:, None, :]))[:, None]  # [num_rows, 1, num_tokens, num_tokens]


def learning_rate(progress: float, peak: float, warm_up: float = 0.02, floor: float = 0.03) -> float:
    """Linear warm-up, then a cosine down to floor * peak; progress runs from 0 to 1."""
    if progress < warm_up:
        return peak * (progress + 1e-4) / warm_up
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warm_up) / (1 - warm_up))))
    return peak * (floor + (1 - floor) * cosine)


def _save_whole(state: dict[str, object], path: Path) -> None:
    """Write a file whole or not at all."""
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def narrowed(embeddings: Tensor, width: int) -> Tensor:
    """Embeddings in the directions in which they differ most.

    Shapes: embeddings [vocab_size, hidden_size]; result [vocab_size, width]
    """
    _, _, directions = torch.linalg.svd(embeddings.float(), full_matrices=False)
    return embeddings.float() @ directions[:width].T


class Trainer:
    """Model, optimizer and clock of one training, saved and restored together."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(arguments.seed)
        self.shape = Shape(hidden_size=arguments.hidden, intermediate_size=arguments.intermediate,
                           num_hidden_layers=arguments.layers, num_attention_heads=arguments.hidden // 64,
                           num_key_value_heads=arguments.kv_heads)  # fmt: skip
        self.model = Llama(self.shape).to(self.device)
        if arguments.embeddings:
            known = load_file(arguments.embeddings / "model.safetensors")["model.embed_tokens.weight"]
            with torch.no_grad():
                self.model.embed_tokens.weight.copy_(narrowed(known, arguments.hidden))
        matrices = [p for p in self.model.parameters() if p.dim() == 2]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": arguments.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=arguments.lr, betas=(0.9, 0.95), fused=self.device.type == "cuda")  # fmt: skip
        self.step, self.tokens, self.trained_seconds = 0, 0, 0.0
        self.best_loss = math.inf
        self.run = torch.compile(self.model) if arguments.compile else self.model

    def save(self, path: Path) -> None:
        """Write a checkpoint that a later run goes on from."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "shape": self.shape.to_dict(),
            "step": self.step,
            "tokens": self.tokens,
            "trained_seconds": self.trained_seconds,
            "best_loss": self.best_loss,
        }
        _save_whole(state, path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint of the same shape."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens, self.trained_seconds = state["step"], state["tokens"], state["trained_seconds"]
        self.best_loss = state["best_loss"]

    def keep_best(self, held_out_loss: float, path: Path) -> None:
        """Write the weights if none before them had a lower held-out loss."""
        if held_out_loss < self.best_loss:
            self.best_loss = held_out_loss
            state = {"model": self.model.state_dict(), "shape": self.shape.to_dict(),
                     "step": self.step, "tokens": self.tokens, "held_out_loss": held_out_loss}  # fmt: skip
            _save_whole(state, path)

    def loss(self, rows: Tensor) -> Tensor:
        """Mean loss over the counted tokens of some rows."""
        token_ids, targets = split_rows(rows)
        mask = document_mask(token_ids) if self.arguments.separate_documents else None
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.run(token_ids, mask)
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100)

    def train_step(self, rows: Tensor, progress: float) -> tuple[Tensor, float]:
        """One step of the optimizer; returns the loss, still on the device, and the learning rate."""
        rate = learning_rate(progress, self.arguments.lr)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.loss(rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += rows.numel()
        return loss.detach(), rate

    @torch.no_grad()
    def validate(self, rows: Tensor) -> float:
        """Mean loss over held-out rows; every batch has the size of a training batch, so nothing is compiled anew."""
        size = self.arguments.rows
        batches = [rows[at : at + size] for at in range(0, len(rows) - size + 1, size)][:8]
        return sum(self.loss(batch).item() for batch in batches) / max(1, len(batches))


def train(arguments: argparse.Namespace) -> float:
    """Train until the minutes or the steps are used up; returns the last validation loss."""
    start = time.time()
    deadline = start + 60 * arguments.max_minutes
    arguments.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(arguments)
    checkpoint, best = arguments.out / "checkpoint.pt", arguments.out / "best.pt"
    if checkpoint.exists() and not arguments.fresh:
        trainer.load(checkpoint)
    pool = RowPool(arguments.data, trainer.device, arguments.seed + trainer.step)
    while not (len(pool.rows) and (arguments.data / "val.npy").exists()):
        if time.time() > deadline:
            raise SystemExit(f"no training data appeared in {arguments.data}")
        pool.take_new_shards()
        time.sleep(0.2)
    held_out = torch.from_numpy(np.load(arguments.data / "val.npy").view(np.int16)).to(trainer.device)
    print(
        f"{trainer.model.num_parameters():,} parameters on {trainer.device}, {len(pool.rows):,} rows to begin with",
        flush=True,
    )

    curve_path = arguments.out / "loss.csv"
    has_past = trainer.step > 0 and curve_path.exists()
    validation = float("nan")
    with curve_path.open("a" if has_past else "w", newline="") as file:
        curve = csv.writer(file)
        if not has_past:
            curve.writerow(["step", "seconds", "tokens", "lr", "loss", "held_out_loss"])
        before, began, total = trainer.trained_seconds, 0.0, 1.0
        while time.time() < deadline and (not arguments.max_steps or trainer.step < arguments.max_steps):
            # The first step compiles; the clock of the schedule starts after it.
            if began:
                trainer.trained_seconds = before + time.time() - began
            by_steps = trainer.step / arguments.max_steps if arguments.max_steps else 0.0
            loss, rate = trainer.train_step(
                pool.next_batch(arguments.rows), max(by_steps, trainer.trained_seconds / total)
            )
            if not began:
                loss.item()
                began = time.time()
                planned = before + deadline - began - 10  # seconds kept for the last validation and the checkpoint
                total = max(1.0, 60 * arguments.total_minutes or planned)
                deadline -= 10 if arguments.max_minutes > 1 else 0
            if trainer.step % arguments.log_every == 0:
                pool.take_new_shards()
                is_due = trainer.step % (10 * arguments.log_every) == 0
                if is_due:
                    validation = trainer.validate(held_out)
                    trainer.keep_best(validation, best)
                curve.writerow([trainer.step, round(trainer.trained_seconds, 1), trainer.tokens, f"{rate:.3g}",
                                round(loss.item(), 4), round(validation, 4) if is_due else ""])  # fmt: skip
                speed = (
                    trainer.trained_seconds - before
                ) and arguments.rows * 1024 * trainer.step / trainer.trained_seconds
                step, rows = trainer.step, f"{len(pool.rows):,} rows"
                print(f"step {step} loss {loss.item():.4f} held-out {validation:.4f} lr {rate:.2e} "
                      f"{speed / 1e6:.2f} M tokens/s, {rows}", flush=True)  # fmt: skip
        validation = trainer.validate(held_out)
        trainer.keep_best(validation, best)
        curve.writerow([trainer.step, round(trainer.trained_seconds, 1), trainer.tokens, "", "", round(validation, 4)])
    trainer.save(checkpoint)
    write_curve(curve_path, arguments.out / "loss.svg")
    spent = f"{trainer.step} steps, {trainer.tokens:,} tokens, {time.time() - start:.0f} s"
    print(f"done: {spent}, held-out loss {validation:.4f}, at its best {trainer.best_loss:.4f}", flush=True)
    return validation


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-minutes", type=float, default=8.5, help="of this run, all included")
    parser.add_argument("--total-minutes", type=float, default=0.0, help="of all runs; 0: this is the last one")
    parser.add_argument("--max-steps", type=int, default=0)
    parser.add_argument("--rows", type=int, default=128, help="rows of 1,024 tokens in a step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--intermediate", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument(
        "--embeddings", type=Path, help="begin with those of this wider model in 16 bits, of the same vocabulary"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--separate-documents", action="store_true", help="no attention between documents of a row")
    parser.add_argument("--fresh", action="store_true", help="ignore a checkpoint that is there")
    return parser.parse_args(words)


if __name__ == "__main__":
    train(parse())
