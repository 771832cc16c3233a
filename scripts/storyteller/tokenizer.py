"""The SentencePiece vocabulary: trains it on generated text, and turns documents into token ids for training.

No dummy prefix and no normalisation, so that the ids of a text never depend on what stands before it.
"""

from __future__ import annotations

import io
import re
import string
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import sentencepiece

from .beginnings import Document
from .corpus import documents

VOCAB_SIZE = 4096
UNK_ID, BOS_ID, EOS_ID = 0, 1, 2
MARKERS = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
MARKER_IDS = {marker: 3 + index for index, marker in enumerate(MARKERS)}
END_ID = MARKER_IDS["<|end|>"]

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_CHUNK = re.compile(r" ?[^ \n]+|\n| ")
_CACHE_LIMIT = 200_000
# Share of what users type that is split into other pieces than usual, and how many of its joints stay open.
SPLIT_SHARE = 0.3
SPLIT_DROPOUT = 0.15


def _training_text(num_documents: int) -> Iterator[str]:
    # Every required character must be seen, or some versions of the trainer give up.
    yield string.ascii_letters + string.digits + string.punctuation
    for document in islice(documents(seed=0, shard=1_000_000), num_documents):
        for role, text in document:
            if role == "given":
                continue  # strange text needs no pieces of its own
            yield from (line for line in text.split("\n") if line)


def train_tokenizer(path: Path, num_documents: int = 6_000) -> None:
    """Train the vocabulary on documents of a shard of its own and write `tokenizer.model`."""
    model = io.BytesIO()
    characters = string.ascii_letters + string.digits + string.punctuation
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=_training_text(num_documents), model_writer=model, model_type="bpe", vocab_size=VOCAB_SIZE,
        byte_fallback=True, character_coverage=1.0, required_chars=characters,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False, split_digits=True,
        control_symbols=list(MARKERS), unk_id=UNK_ID, bos_id=BOS_ID, eos_id=EOS_ID, pad_id=-1, unk_piece="<unk>",
        num_threads=8, minloglevel=2,
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.getvalue())


class Encoder:
    """Encodes documents with a cache of words: a piece never crosses a space, so words can be looked up one by one."""

    def __init__(self, path: Path, seed: int = 0) -> None:
        sentencepiece.set_random_generator_seed(seed)
        self._random = Random(seed)
        self.processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, the same as SentencePiece gives, several times faster on story text."""
        ids: list[int] = []
        cache = self._cache
        for chunk in _CHUNK.findall(text):
            piece_ids = cache.get(chunk)
            if piece_ids is None:
                piece_ids = self.processor.encode(chunk)
                if len(cache) < _CACHE_LIMIT:
                    cache[chunk] = piece_ids
            ids += piece_ids
        return ids

    def encode_typed(self, text: str) -> list[int]:
        """Token ids of what a user types; now and then in other pieces, so that no sequence of pieces is a surprise."""
        if self._random.random() >= SPLIT_SHARE:
            return self.encode(text)
        return self.processor.encode(text, enable_sampling=True, alpha=SPLIT_DROPOUT, nbest_size=-1)

    def encode_document(self, document: Document, max_tokens: int) -> tuple[list[int], list[bool]]:
        """Ids of a document, and for each whether the loss counts it: raw text and what the assistant says.

        A piece of the role "given" is the beginning of the raw text after it, and not counted. Exchanges that do not
        fit are left off the end.
        """
        ids, counts = [BOS_ID], [False]
        for role, text in document:
            body = self.encode(text) if role in ("", "assistant") else self.encode_typed(text)
            if role == "given":
                pass
            elif role:
                body = [MARKER_IDS[f"<|{role}|>"], *body, END_ID]
            else:
                body.append(EOS_ID)
            if len(ids) + len(body) > max_tokens:
                break
            ids += body
            is_told = role in ("", "assistant")
            # The marker itself is given at generation time, so it is never learned.
            counts += [is_told and not role] + [is_told] * (len(body) - 1)
        return ids, counts
