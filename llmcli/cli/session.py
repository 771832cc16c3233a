"""Wires model, tokenizer, sampling and runner together; the one place with function-level imports.

Importing torch, numpy or a tokenizer takes up to a second, so they are imported when a command needs them: `--help`
and usage errors come at once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.cli.terminal import terminal
from llmcli.errors import DeviceError, UsageError

if TYPE_CHECKING:
    from llmcli.checkpoint.model import Model
    from llmcli.engine.generation import Generation
    from llmcli.runners.base import Runner
    from llmcli.sampling.params import ResolvedSampling
    from llmcli.tokenizer.base import Tokenizer

DEFAULT_MAX_CONTEXT = 8192
DEFAULT_MAX_NEW_TOKENS = 256

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class RunnerOptions:
    """How the model is to be run, as the flags say it."""

    device: str
    dtype: str
    num_threads: int | None

    def __post_init__(self) -> None:
        """Refuse unknown names, and devices this version cannot use."""
        if self.device not in DEVICES:
            raise UsageError(f"--device is {self.device!r}, expected one of {', '.join(DEVICES)}")
        if self.dtype not in DTYPES:
            raise UsageError(f"--dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)}")
        if self.device == "cuda":
            raise DeviceError("--device cuda: this version has no CUDA runner yet; use --device cpu")


@dataclass(frozen=True)
class Session:
    """A model folder whose files are checked and whose tokenizer is loaded; no weights are read yet."""

    model: Model
    tokenizer: Tokenizer

    @property
    def name(self) -> str:
        """The model folder's name, for the user."""
        return self.model.checkpoint.folder.resolve().name

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every end-of-sequence id that generation_config.json, config.json or the tokenizer names."""
        from llmcli.config.fields import Fields

        folder = self.model.checkpoint.folder
        generation_config = Fields(self.model.checkpoint.generation_config, str(folder / "generation_config.json"))
        ids = {*generation_config.token_ids("eos_token_id"), *self.model.config.eos_token_ids}
        return frozenset(ids) | self.tokenizer.eos_token_ids

    def resolve_context(self, requested: int | None) -> int:
        """The context to allocate.

        Raises: UsageError for more than the model's maximum.
        """
        maximum = self.model.config.max_position_embeddings
        if requested is None:
            return min(maximum, DEFAULT_MAX_CONTEXT)
        if requested > maximum:
            raise UsageError(
                f"--context {requested} is over the {maximum} tokens {self.name} was made for "
                f"(max_position_embeddings); use --context {maximum} or less"
            )
        return requested

    def encode_prompt(self, prompt: str) -> list[int]:
        """The prompt's token ids, BOS included as the model's tokenizer adds it.

        Raises: UsageError if there is not a single token to start from, or an id the model has no embedding for.
        """
        token_ids = self.tokenizer.encode(prompt)
        if not token_ids:
            raise UsageError("the prompt is empty and this model's tokenizer adds no BOS token; give it a prompt")
        if (largest := max(token_ids)) >= (vocab_size := self.model.config.vocab_size):
            raise UsageError(
                f"the tokenizer gave id {largest}, but the model has {vocab_size} embeddings; "
                "the tokenizer belongs to another model"
            )
        return token_ids

    def resolve_sampling(self, flags: Mapping[str, object], preset_name: str | None) -> ResolvedSampling:
        """Each sampling parameter from flag, preset, generation_config.json or default, in this order."""
        from llmcli.config.presets import load_preset
        from llmcli.sampling.params import resolve

        preset = load_preset(preset_name) if preset_name is not None else None
        generation_config = self.model.checkpoint.generation_config
        return resolve(flags, preset.sampling if preset else {}, preset.name if preset else "", generation_config)

    def resolve_max_new_tokens(self, requested: int | None, num_prompt_tokens: int, context: int) -> int:
        """How many tokens to generate. An explicit number must fit; the default is cut to the room there is.

        Raises: UsageError with the counts and the remedy if prompt and new tokens exceed the context.
        """
        room = context - num_prompt_tokens
        if requested is None and room >= 1:
            if room < DEFAULT_MAX_NEW_TOKENS:
                terminal.info(f"room for {room} new tokens: prompt {num_prompt_tokens}, context {context}")
            return min(DEFAULT_MAX_NEW_TOKENS, room)
        new_tokens = 1 if requested is None else requested
        if new_tokens <= room:
            return new_tokens
        maximum = self.model.config.max_position_embeddings
        needed = num_prompt_tokens + new_tokens
        if needed <= maximum:
            remedy = f"use --context {needed}"
        elif room >= 1:
            remedy = f"use --max-new-tokens {room} or a shorter prompt ({self.name} was made for {maximum} tokens)"
        else:
            remedy = f"use a shorter prompt ({self.name} was made for {maximum} tokens)"
        raise UsageError(
            f"prompt {num_prompt_tokens} + new tokens {new_tokens} = {needed} tokens, "
            f"over the context of {context}; {remedy}"
        )

    def load_runner(self, options: RunnerOptions, context: int) -> tuple[Runner, float]:
        """Read the weights; return the runner and the seconds it took, torch's import included."""
        start_time = time.perf_counter()
        if unused := self.model.tensors.unused:
            more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
            terminal.warn(f"{self.name} holds tensors its config has no use for: {', '.join(unused[:3])}{more}")
        with terminal.progress(f"loading {self.name}") as on_progress:
            from llmcli.runners.torch.load import load

            runner = load(
                self.model,
                max_seq_len=context,
                dtype=options.dtype,
                num_threads=options.num_threads,
                on_progress=on_progress,
            )
        return runner, time.perf_counter() - start_time

    def generation(
        self,
        runner: Runner,
        prompt_token_ids: list[int],
        sampling: ResolvedSampling,
        *,
        seed: int,
        samples: tuple[int, ...],
        max_new_tokens: int,
        stop_strings: tuple[str, ...],
    ) -> Generation:
        """A generation ready to run."""
        from llmcli.engine.generation import Generation, Request

        request = Request(
            prompt_token_ids=tuple(prompt_token_ids),
            params=sampling.params,
            seed=seed,
            samples=samples,
            max_new_tokens=max_new_tokens,
            stop_strings=stop_strings,
            eos_token_ids=self.eos_token_ids,
        )
        return Generation(runner, self.tokenizer, request)


def open_session(folder: Path) -> Session:
    """Check a model folder and load its tokenizer.

    Raises: CheckpointError and its subclasses.
    """
    from llmcli.checkpoint.model import open_model
    from llmcli.tokenizer.load import load_tokenizer

    return Session(open_model(folder), load_tokenizer(folder))
