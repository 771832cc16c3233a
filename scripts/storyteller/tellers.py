"""Adapters from a conversation to a reply: the seam between the evaluation and whatever generates the text."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from .model import Llama, Shape
from .tokenizer import BOS_ID, END_ID, EOS_ID, MARKER_IDS, Encoder

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back, and whether the teller ended it by itself."""

    text: str
    is_finished: bool


# Replies to conversations, in order; reply k of a seed is the same every time.
Teller = Callable[[list[list[Message]], int], list[Reply]]


def command_teller(command: list[str]) -> Teller:
    """A teller that runs a command such as `llmcli generate --json`, the conversation as JSON on its input.

    The command prints one JSON object with `text` and `finish_reason`.
    """

    def tell(conversations: list[list[Message]], seed: int) -> list[Reply]:
        replies = []
        for index, messages in enumerate(conversations):
            done = subprocess.run([*command, "--seed", str(seed + index)], input=json.dumps({"messages": messages}),
                                  capture_output=True, text=True, check=True)  # fmt: skip
            answer = json.loads(done.stdout)
            replies.append(Reply(answer["text"].strip(), answer["finish_reason"] == "stop"))
        return replies

    return tell


def checkpoint_teller(
    checkpoint: Path,
    tokenizer: Path,
    temperature: float = 0.9,
    top_p: float = 0.95,
    min_p: float = 0.02,
    repetition_penalty: float = 1.05,
    max_new_tokens: int = 700,
    max_rows: int = 256,
) -> Teller:
    """A teller over a checkpoint of the training, many conversations at once, with the settings of the story preset.

    There is no KV cache: on a GPU a batch of a few hundred stories takes seconds without.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    state = torch.load(checkpoint, map_location=device, weights_only=True)
    shape = Shape(**state["shape"])
    model = Llama(shape).to(device).eval()
    model.load_state_dict(state["model"])
    encoder = Encoder(tokenizer)

    def prompt_ids(messages: list[Message]) -> list[int]:
        ids = [BOS_ID]
        for message in messages:
            ids += [MARKER_IDS[f"<|{message['role']}|>"], *encoder.encode(message["content"]), END_ID]
        return [*ids, MARKER_IDS["<|assistant|>"]]

    @torch.no_grad()
    def tell_rows(prompts: list[list[int]], seed: int) -> list[Reply]:
        random = torch.Generator(device).manual_seed(seed)
        lengths = torch.tensor([len(ids) for ids in prompts], device=device)
        token_ids = torch.zeros(len(prompts), shape.max_position_embeddings, dtype=torch.int64, device=device)
        for row, ids in enumerate(prompts):
            token_ids[row, : len(ids)] = torch.tensor(ids)
        is_open = torch.ones(len(prompts), dtype=torch.bool, device=device)
        rows = torch.arange(len(prompts), device=device)
        is_finished = torch.zeros_like(is_open)
        seen = torch.zeros(len(prompts), shape.vocab_size, dtype=torch.bool, device=device)  # tokens to be penalised
        for row, ids in enumerate(prompts):
            seen[row, ids] = True
        ends = lengths.clone()
        for _ in range(max_new_tokens):
            is_open &= ends < shape.max_position_embeddings
            if not bool(is_open.any()):
                break
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
                logits = model(token_ids[:, : int(ends.max())])[rows, ends - 1].float()
            weakened = torch.where(logits > 0, logits / repetition_penalty, logits * repetition_penalty)
            logits = torch.where(seen, weakened, logits)
            probabilities, order = torch.softmax(logits / temperature, -1).sort(-1, descending=True)
            probabilities[probabilities.cumsum(-1) - probabilities > top_p] = 0
            probabilities[probabilities < min_p * probabilities[:, :1]] = 0
            picked = order.gather(1, torch.multinomial(probabilities, 1, generator=random))[:, 0]
            token_ids[rows[is_open], ends[is_open]] = picked[is_open]
            seen[rows, picked] = True
            ends += is_open
            is_finished |= is_open & ((picked == END_ID) | (picked == EOS_ID))
            is_open &= ~is_finished
        return [
            Reply(encoder.processor.decode([i for i in ids[start:end] if i > 6]).strip(), finished)
            for ids, start, end, finished in zip(
                token_ids.tolist(), lengths.tolist(), ends.tolist(), is_finished.tolist(), strict=True
            )
        ]

    def tell(conversations: list[list[Message]], seed: int) -> list[Reply]:
        prompts = [prompt_ids(messages) for messages in conversations]
        replies: list[Reply] = []
        for at in range(0, len(prompts), max_rows):
            replies += tell_rows(prompts[at : at + max_rows], seed + at)
        return replies

    return tell
