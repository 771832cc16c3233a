"""`Session`: a model with its tokenizer and what its files say about prompts, sampling and runners.

Also the token tree that a schema needs, built while everything else starts.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from llmcli.checkpoint.hub_library import find_hub_id, is_gguf
from llmcli.cli import lazy
from llmcli.cli.device_choice import RunnerOptions, has_driver, load_runner
from llmcli.cli.progress import progress
from llmcli.cli.prompt import SamplerFlags
from llmcli.cli.settings import read_settings
from llmcli.cli.spelling import near_names
from llmcli.cli.terminal import OnProgress, terminal
from llmcli.cli.units import first_of
from llmcli.errors import CheckpointError, TokenizerError, UsageError
from llmcli.openai_body import message_of
from llmcli.resources import (
    BUILT_IN_MODELS,
    STORYTELLER,
    built_in_model,
    gguf_cache_folder,
    private_folder,
    resource_folder,
    temporary_folder,
)
from llmcli.sampling.params import DEFAULT_ORDER, ResolvedSampling, SamplingParams
from llmcli.timeline import IMPORTS, Timeline

_MAX_NAMED = 3

DEFAULT_MAX_CONTEXT = 8192
DEFAULT_MAX_NEW_TOKENS = 256

# What stops DRY's search for repeats, as in llama.cpp: line ends, and the punctuation of dialogue and lists.
DRY_BREAKERS = (b"\n", b":", b'"', b"*")


class TokenTree:
    """The tokens of the tokenizer in `folder`, for a model with `vocab_size` logits.

    Starts at once from an earlier run's copy, while the tokenizer may still be loading.
    """

    def __init__(self, folder: Path, vocab_size: int):
        self._folder = folder
        self._vocab_size = vocab_size
        self._pool = ThreadPoolExecutor(1, "tokens")
        self._kept = self._pool.submit(self._make_of_kept)
        self._made: Future[lazy.library.Tokens] | None = None

    def start(self, tokenizer: lazy.tokenizer.Tokenizer) -> None:
        """Start from the tokenizer if there is no copy."""
        if self._made is None:
            self._made = self._pool.submit(self._make, tokenizer)

    def tokens(self) -> lazy.library.Tokens:
        """Wait for the result; call `start` before."""
        assert self._made is not None
        return self._made.result()

    def _make_of_kept(self) -> lazy.library.Tokens | None:
        pieces = lazy.pieces.find_kept_pieces(self._folder)
        return None if pieces is None else lazy.library.Tokens(pieces.first(self._vocab_size))

    def _make(self, tokenizer: lazy.tokenizer.Tokenizer) -> lazy.library.Tokens:
        kept = self._kept.result()
        if kept is not None:
            return kept
        pieces = lazy.pieces.TokenPieces.of(tokenizer)
        self._pool.submit(lazy.pieces.keep_pieces, self._folder, pieces)
        return lazy.library.Tokens(pieces.first(self._vocab_size))


def warn_of(model: lazy.model.Model, name: str) -> None:
    """Warn of unused tensors, and show the notes of the model, a line each; `name` is its name."""
    if unused := model.tensors.unused:
        terminal.warn(f"{name} has tensors that its config does not use: {first_of(unused, _MAX_NAMED)}")
    for note in model.notes:
        terminal.warn(f"{name}: {note}")


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as text and ids, and what ends an answer to it besides the model's end-of-sequence tokens."""

    text: str
    token_ids: tuple[int, ...]
    at_start: bool  # the answer is a text of its own, without its leading space
    turn_end_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    start: lazy.chat_events.Start = "answer"  # else reasoning may come first, as the chat template knows it
    offer: lazy.tool_offer.Offer | None = None  # the tools that the answer may call
    shown_token_ids: frozenset[int] = frozenset()  # special tokens of such calls

    def answer_start(self, *, is_held: bool) -> lazy.chat_events.Start:
        """What the answer begins with. One that is held to a schema has no reasoning, even if the template opens it.

        What holds tool calls lets reasoning come before them.
        """
        return "undecided" if is_held and self.offer is None and self.start == "reasoning" else self.start

    def message(self, text: str, *, is_held: bool, origin: tuple[object, ...]) -> dict[str, Any]:
        """The message of an answer: what it reasons, says, and calls. `origin` decides the ids of calls."""
        reasoning, said = lazy.chat_events.split_reasoning(text, self.answer_start(is_held=is_held))
        if self.offer is None:
            return message_of(said, reasoning)
        content, calls = lazy.tool_calls.split_calls(self.offer.reader(), said)
        numbered = enumerate(calls)
        return message_of(
            content, reasoning, [lazy.tool_calls.openai_call(call, (*origin, number)) for number, call in numbered]
        )

    def held_to(self, asked: lazy.constraint.Constraint | None) -> lazy.constraint.Constraint | None:
        """What the answer is held to: with tools their schemas in calls, and what is `asked` in a text without calls.

        Raises: UsageError for tools, and anything asked besides a JSON Schema
        """
        if self.offer is None:
            return asked
        if asked is not None and asked.kind != "schema":
            raise UsageError(f"tools and {asked.key} cannot be combined")
        value = {**self.offer.constraint_value(), "start": self.start}
        return lazy.constraint.Constraint(
            "tools", "tools", value if asked is None else {**value, "text": (asked.key, asked.value)}
        )


@dataclass(frozen=True)
class Session:
    """A model whose files are checked and whose tokenizer is loaded; no weights are read yet.

    `name` is for the user: the folder's name, or the hub id. `token_tree` is set if requested early.
    """

    model: lazy.model.Model
    tokenizer: lazy.tokenizer.Tokenizer
    name: str
    token_tree: TokenTree | None = None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every end-of-sequence id that generation_config.json, config.json or the tokenizer names."""
        ids = {*self._generation_config.token_ids("eos_token_id"), *self.model.config.eos_token_ids}
        return frozenset(ids) | self.tokenizer.eos_token_ids

    @property
    def _generation_config(self) -> lazy.fields.Fields:
        """The model's own defaults for generation, without null values."""
        checkpoint = self.model.checkpoint
        values = {key: value for key, value in checkpoint.generation_config.items() if value is not None}
        return lazy.fields.Fields(values, str(checkpoint.folder / "generation_config.json"))

    def resolve_context(self, requested: int | None, default_maximum: int = DEFAULT_MAX_CONTEXT) -> int:
        """The context to allocate: the one requested, or the model's maximum up to a default.

        Raises: UsageError for more than the model's maximum.
        """
        return resolve_context(self.model.config, self.name, requested, default_maximum)

    def encode_prompt(self, prompt: str) -> EncodedPrompt:
        """A raw text, with BOS as the model's tokenizer adds it.

        Raises: UsageError if there is not a single token to start from, or an id the model has no embedding for.
        """
        token_ids = self.tokenizer.encode(prompt)
        if not token_ids:
            raise UsageError("the prompt is empty and this model's tokenizer adds no BOS token; give a prompt")
        is_empty = all(token_id in self.tokenizer.special_token_ids for token_id in token_ids)
        return EncodedPrompt(prompt, self._checked(token_ids), at_start=is_empty)

    def open_template(
        self, choice: str | None, variables: Mapping[str, Any] | None = None
    ) -> tuple[lazy.chat_encoding.ChatTemplate, frozenset[int]]:
        """The model's chat template, or the chosen one, and the tokens that end a turn in it.

        Raises: UsageError if there is none or it does not look up one of the variables, TokenizerError if it is
        malformed.
        """
        template = lazy.chat_encoding.load_chat_template(
            self.model.checkpoint.folder, self.tokenizer, choice, variables
        )
        return template, lazy.chat_encoding.turn_end_token_ids(self.tokenizer, template)

    def encode_message(
        self, message: str, system: str | None, template_choice: str | None, variables: Mapping[str, Any] | None = None
    ) -> EncodedPrompt:
        """A user's message, with any system prompt, in the template.

        Raises: as `open_template`; TokenizerError if the template refuses them
        """
        messages = [{"role": "system", "content": system}] if system is not None else []
        encode = self.message_encoder(*self.open_template(template_choice, variables))
        return encode([*messages, {"role": "user", "content": message}])

    def message_encoder(
        self, template: lazy.chat_encoding.ChatTemplate, ends: frozenset[int]
    ) -> Callable[..., EncodedPrompt]:
        """An encoder of conversations with the template from `open_template`.

        The result takes messages, variables of the template for them alone, as `chat_template_kwargs`, and tools. It
        raises UsageError for a variable or tools that the template does not look up, TokenizerError if the template
        refuses a conversation, or leaves a message out.
        """

        def encode(
            messages: Sequence[Mapping[str, Any]],
            variables: Mapping[str, Any] | None = None,
            tools: lazy.tools.Tools | None = None,
        ) -> EncodedPrompt:
            variables = variables or {}
            template.refuse_unknown(variables, "chat_template_kwargs")
            offer = None if tools is None else lazy.tool_offer.Offer.of(tools, template)
            if tools is not None:
                variables = {**variables, "tools": tools.tools}
            token_ids = lazy.chat_encoding.encode_chat(self.tokenizer, template, messages, **variables)
            if not token_ids:
                raise TokenizerError(
                    f"{template.origin} gives an empty prompt for this message; choose another with --chat-template"
                )
            template.refuse_dropped(messages, tools.tools if tools else ())
            text, checked = template.render(messages, **variables), self._checked(token_ids)
            knows_reasoning = lazy.chat_events.CLOSING in template.source
            return EncodedPrompt(
                text,
                checked,
                at_start=True,
                turn_end_token_ids=ends,
                stop_strings=template.stop_strings,
                start=lazy.chat_events.start_after(text) if knows_reasoning else "answer",
                offer=offer,
                shown_token_ids=frozenset() if offer is None else offer.token_ids(self.tokenizer),
            )

        return encode

    def _checked(self, token_ids: list[int]) -> tuple[int, ...]:
        if (largest := max(token_ids)) >= (vocab_size := self.model.config.vocab_size):
            raise UsageError(
                f"the tokenizer gave id {largest}, but the model has {vocab_size} embeddings; "
                "the tokenizer belongs to another model"
            )
        return tuple(token_ids)

    @cached_property
    def _generation_defaults(self) -> lazy.fields.GenerationDefaults:
        """What generation_config.json asks for besides numbers."""
        return lazy.fields.read_generation_defaults(
            self._generation_config, self.eos_token_ids, self.model.config.vocab_size
        )

    def resolve_sampling(
        self,
        numbers: Mapping[str, object],
        preset_name: str | None,
        flags: SamplerFlags | None = None,
        stop_strings: tuple[str, ...] = (),
    ) -> ResolvedSampling:
        """Each sampling parameter from flag, preset, generation_config.json or default, in this order.

        Raises: UsageError for a bad value; CheckpointError for one in generation_config.json that no flag overrides.
        """
        preset = lazy.presets.load_preset(preset_name) if preset_name is not None else None
        of_preset = (preset.sampling, preset.name) if preset else ({}, "")
        sampling = lazy.params.resolve(numbers, *of_preset, self.model.checkpoint.generation_config)
        others = {name: (text, lazy.params.GENERATION_CONFIG) for name, text in self._generation_defaults.shown.items()}
        if stop_strings:
            others["stop_strings"] = (", ".join(map(repr, stop_strings)), "flag")
        if flags is not None and flags.dry_breakers is not None:
            others["dry_breakers"] = (", ".join(map(repr, flags.dry_breakers)) or "none", "flag")
        sampling = replace(sampling, others=others)
        return sampling if flags is None or flags.order is None else lazy.params.leave_out(sampling, flags.order)

    def resolve_stop_strings(self, requested: tuple[str, ...]) -> tuple[str, ...]:
        """What a text stops before: the requested stop strings, else those of generation_config.json."""
        return requested or self._generation_defaults.stop_strings

    def say_what_is_not_applied(self) -> None:
        """Warn of keys in generation_config.json that would change transformers' text."""
        if keys := self._generation_defaults.not_applied:
            terminal.warn(f"{self.name}: generation_config.json sets {', '.join(keys)}; not applied here")

    def can_end(self, prompt: EncodedPrompt) -> bool:
        """Whether a text after this prompt can end by itself."""
        return bool(self.eos_token_ids | prompt.turn_end_token_ids)

    def limit_new_tokens(
        self, requested: int | None, num_prompt_tokens: int, context: int, *, can_end: bool = False
    ) -> int | None:
        """How many tokens to generate; None means until the text ends by itself or the context is full.

        The default is max_new_tokens of generation_config.json. Without it there is no limit if the text can end by
        itself, else ours. An explicit number must fit.

        Raises: UsageError with the counts and the remedy if prompt and new tokens exceed the context; CheckpointError
        if the model's default is not a positive number.
        """
        room = context - num_prompt_tokens
        if requested is None and room >= 1:
            usual = room if can_end else DEFAULT_MAX_NEW_TOKENS
            default = self._generation_config.positive_int("max_new_tokens", usual)
            return default if default < room else None
        new_tokens = 1 if requested is None else requested
        if new_tokens <= room:
            return new_tokens
        maximum = self.model.config.max_position_embeddings
        needed = num_prompt_tokens + new_tokens
        limit = f"the context limit of {self.name} is {maximum} tokens"
        more = "" if requested is None else f", and --max-new-tokens is {requested}"
        if needed <= maximum:
            remedy = f"use --context {needed}"
        elif room >= 1:
            remedy = f"use --max-new-tokens {room} or a shorter prompt ({limit})"
        else:
            remedy = f"use a shorter prompt ({limit})"
        raise UsageError(f"the prompt has {num_prompt_tokens} tokens{more}; the context holds {context}; {remedy}")

    def load_runner(
        self,
        options: RunnerOptions,
        context: int,
        num_rows: int | None = 1,
        timeline: Timeline | None = None,
        *,
        host_rows: int = 1,
    ) -> tuple[lazy.runners.Runner, float]:
        """Read the weights; return the runner and the seconds it took, the import of its library included.

        `num_rows` and `host_rows` as for `device_choice.load_runner`.
        """
        start_time = time.perf_counter()
        warn_of(self.model, self.name)
        first = "starting the card"
        if options.device == "cpu" or not has_driver():
            first = "" if options.runs_on_numpy(self.model) else "importing torch"
        with progress(f"loading {self.name}", first=first) as on_progress:
            runner = load_runner(self.model, options, context, num_rows, on_progress, timeline, host_rows=host_rows)
        return runner, time.perf_counter() - start_time

    def sampler(
        self, params: SamplingParams, seed: int, prompt: EncodedPrompt, flags: SamplerFlags
    ) -> lazy.params.Sampler:
        """The sampler of an answer to `prompt`.

        Raises: UsageError for a bias on a token that the model lacks, or a DRY breaker in no token; as `Sampler`.
        """
        vocab_size = self.model.config.vocab_size
        if unknown := [token_id for token_id in flags.logit_bias if token_id >= vocab_size]:
            raise UsageError(f"--logit-bias names token {unknown[0]}, but {self.name} has tokens 0 to {vocab_size - 1}")
        defaults = self._generation_defaults
        return lazy.params.Sampler(
            params,
            seed=seed,
            num_prompt_tokens=len(prompt.token_ids),
            eos_token_ids=self.eos_token_ids | prompt.turn_end_token_ids,
            ignore_eos=flags.ignore_eos,
            logit_bias={**dict.fromkeys(defaults.suppress_token_ids, -math.inf), **flags.logit_bias},
            sequence_bias=defaults.sequence_bias,
            begin_suppress_token_ids=defaults.begin_suppress_token_ids,
            forced_eos_token_ids=frozenset() if flags.ignore_eos else defaults.forced_eos_token_ids,
            dry_breaker_token_ids=self._dry_breakers(flags) if params.dry_multiplier else frozenset(),
            order=DEFAULT_ORDER if flags.order is None else flags.order,
        )

    def _dry_breakers(self, flags: SamplerFlags) -> frozenset[int]:
        """Tokens whose text contains what ends a phrase."""
        if flags.dry_breakers not in self._known_breakers:
            self._known_breakers[flags.dry_breakers] = self._find_dry_breakers(flags)
        return self._known_breakers[flags.dry_breakers]

    @cached_property
    def _known_breakers(self) -> dict[tuple[str, ...] | None, frozenset[int]]:
        """Results of searches of the whole vocabulary: a batch asks for every prompt."""
        return {}

    def _find_dry_breakers(self, flags: SamplerFlags) -> frozenset[int]:
        texts = DRY_BREAKERS if flags.dry_breakers is None else tuple(text.encode() for text in flags.dry_breakers)
        pieces = [self.tokenizer.token_bytes(token_id) for token_id in range(self.tokenizer.vocab_size)]
        for text in flags.dry_breakers or ():
            if not any(text.encode() in piece for piece in pieces):
                raise UsageError(
                    f"--dry-breaker is {text!r}, which no single token of {self.name} contains; shorten it"
                )
        return frozenset(token_id for token_id, piece in enumerate(pieces) if any(text in piece for text in texts))

    def request(
        self,
        prompt: EncodedPrompt,
        sampler: lazy.params.Sampler,
        *,
        samples: tuple[int, ...],
        max_new_tokens: int | None,
        stop_strings: tuple[str, ...],
        num_alternatives: int | None = None,
        keeps_pages: bool = False,
    ) -> lazy.request.Request:
        """The engine's request."""
        return lazy.request.Request(
            prompt_token_ids=prompt.token_ids,
            sampler=sampler,
            samples=samples,
            max_new_tokens=max_new_tokens,
            stop_strings=(*stop_strings, *prompt.stop_strings),
            at_start=prompt.at_start,
            num_alternatives=num_alternatives,
            keeps_pages=keeps_pages,
            shown_token_ids=prompt.shown_token_ids,
        )


def resolve_context(
    config: lazy.llama.LlamaConfig, name: str, requested: int | None, default_maximum: int = DEFAULT_MAX_CONTEXT
) -> int:
    """As `Session.resolve_context`, for a model's config alone."""
    maximum = config.max_position_embeddings
    if requested is None:
        return min(maximum, default_maximum)
    if requested > maximum:
        raise UsageError(
            f"--context {requested} is over the context limit of {name}, {maximum} tokens; "
            f"use --context {maximum} or less"
        )
    return requested


def open_session(name: str | None, timeline: Timeline | None = None, *, holds_texts: bool = False) -> Session:
    """Check a model, named as for `model_folder`, and load its tokenizer; missing files are downloaded first.

    With `holds_texts`, texts will have a schema: their token tree is begun before the tokenizer loads.
    Raises: CheckpointError and its subclasses.
    """
    timeline = timeline or Timeline()
    with timeline.part(IMPORTS):
        open_model, load_tokenizer = lazy.model.open_model, lazy.tokenizer_load.load_tokenizer
    with timeline.part("model's files"):
        folder = model_folder(name)
        model = open_model(folder)
    token_tree = TokenTree(folder, model.config.vocab_size) if holds_texts else None
    with timeline.part("tokenizer"):
        tokenizer = load_tokenizer(folder)
    return Session(model, tokenizer, shown_name(name, folder), token_tree)


def model_folder(name: str | None) -> Path:
    """The folder of a model given by folder, hub id or GGUF file; a folder is not checked.

    None is the built-in model, and a line says so. `storyteller` names it too, and `storyteller-bf16` its 16-bit form,
    unless such a folder exists here.
    Raises: CheckpointError and its subclasses.
    """
    if name is None:
        terminal.info("Using the built-in storyteller, a small demonstration (choose another model with --model)")
        return resource_folder(STORYTELLER)
    if not name:
        raise UsageError("the model name is empty; give a folder or a hub id")
    if (folder := built_in_model(name)) and not Path(name).exists():
        return folder
    if is_gguf(name):
        return folder_of_gguf(Path(name))
    if find_hub_id(name):
        return fetch_model(name)
    if not os.path.exists(name) and (near := near_names(name, [*read_settings().aliases, *BUILT_IN_MODELS])):
        raise CheckpointError(f"there is no model folder {name}; did you mean {' or '.join(near)}?")
    return Path(name)


def folder_of_gguf(path: Path) -> Path:
    """The model folder that was made of a GGUF file, in the cache; it is made at the file's first use.

    Raises: CheckpointError and its subclasses; OutputError for a disk that is too small
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give the path of a GGUF file")
    state = path.stat()
    key = f"{path.resolve()} {state.st_size} {state.st_mtime_ns} {lazy.gguf_model.FORM}"
    folder = private_folder(gguf_cache_folder()) / f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    terminal.info(f"converting {path.name} once, to {folder}")
    with temporary_folder("gguf") as small_files:
        plan = lazy.gguf_model.plan_gguf(path, Path(small_files))
        exporter = lazy.export.Exporter(plan, folder, path.name, open_reader=lazy.gguf_model.GgufReader)
        workspace = exporter.prepare()
        with exporter.lock, progress(f"converting {path.name}") as on_progress:
            exporter.run(workspace, on_progress, lambda module, quality: None)
    return folder


def shown_name(name: str | None, folder: Path) -> str:
    """The name shown for a model: its hub id, or the name of its folder or GGUF file."""
    if name is not None and is_gguf(name):
        return Path(name).name
    return name if name is not None and find_hub_id(name) else folder.resolve().name


def fetch_model(name: str, update: bool = False, *, is_adapter: bool = False) -> Path:
    """The folder of a model or adapter on the hub, from the cache or downloaded into it with a progress bar.

    With `update` a newer commit of the branch is downloaded even if the cache holds an older one.
    Raises: CheckpointError and its subclasses.
    """
    with ExitStack() as stack:
        bar: OnProgress | None = None

        def on_progress(done: int, total: int) -> None:
            nonlocal bar
            if bar is None:  # the first call: only now we know that a download is needed
                terminal.info(f"downloading {name}: {decimal(total - done)} of {decimal(total)}")
                bar = stack.enter_context(progress(f"downloading {name}"))
            bar(done, total)

        resolve = lazy.hub.resolve_adapter if is_adapter else lazy.hub.resolve_model
        return resolve(name, on_progress=on_progress, update=update)
