"""The wiring of a run, for every command that generates: flags, model, runner.

request = check_run(...)      # usage errors, before anything slow; the card begins to start
run = open_run(request, ...)  # files, tokenizer, sampling
runner = run.load(...)        # weights
"""

from __future__ import annotations

import gc
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from llmcli.cli import lazy, shared
from llmcli.cli.device_choice import RunnerOptions, start_device
from llmcli.cli.output.base import RunFacts
from llmcli.cli.prompt import SamplerFlags, checked_stop_strings, parse_sampler_flags
from llmcli.cli.session import EncodedPrompt, Session, open_session
from llmcli.cli.terminal import terminal
from llmcli.errors import LLMCliError, UsageError
from llmcli.resources import STORYTELLER
from llmcli.timeline import Timeline

OFF, NGRAM = "off", "ngram"
DRAFT_WORDS = (OFF, shared.AUTO, NGRAM)  # of --draft; anything else names a model

_OBJECTS_BETWEEN_LOOKS = 50_000  # of Python's collector; usually 700


@dataclass(frozen=True)
class Draft:
    """The choice, and the draft model if it names a usable one, before its weights are read."""

    choice: str
    session: Session | None = None

    def load(self, runner: lazy.runners.Runner, devices: RunnerOptions, context: int) -> lazy.drafts.Drafting | None:
        """What drafts for `runner`; None if nothing does.

        If the draft model cannot be loaded, a line says so, and the run has no drafts.
        """
        if self.choice == OFF or (self.choice not in DRAFT_WORDS and self.session is None):
            return None
        if not runner.limits.max_drafts:
            if self.choice != shared.AUTO:
                terminal.warn(f"--draft {self.choice} has no effect: drafts are not yet verified on this device")
            return None
        if self.session is None:
            return lazy.drafts.Drafting(
                lazy.draft_sources.NgramSource(), least=int(self.choice == NGRAM), on_problem=_say_problem
            )
        try:
            most = self.session.model.config.max_position_embeddings
            num_rows = min(runner.limits.num_rows, lazy.drafts.MAX_DRAFT_ROWS)
            drafter, _ = self.session.load_runner(devices, min(context, most), num_rows, host_rows=num_rows)
        except LLMCliError as error:
            _say_problem(error)
            return None
        terminal.info(f"Drafts by {self.session.name}: {drafter.description}")
        return lazy.drafts.Drafting(lazy.draft_sources.DraftModel(drafter), on_problem=_say_problem)


def open_draft(choice: str, session: Session) -> Draft:
    """Check the value of --draft, and the files of the draft model for `session`'s model if it names one.

    Raises: UsageError for an empty name; CheckpointError and its subclasses for a missing model
    """
    if not choice:
        raise UsageError(f"--draft is empty, expected {', '.join(DRAFT_WORDS)} or a model")
    if choice in DRAFT_WORDS:
        return Draft(choice)
    try:
        drafter = open_session(choice)
    except LLMCliError as error:
        raise type(error)(f"--draft is none of {', '.join(DRAFT_WORDS)}, so it names a model: {error}") from error
    if problem := _find_difference(session.tokenizer, drafter.tokenizer):
        terminal.warn(f"--draft: {drafter.name} has another vocabulary than {session.name}: {problem}; no drafts")
        return Draft(choice)
    return Draft(choice, drafter)


def _find_difference(first: lazy.tokenizer.Tokenizer, second: lazy.tokenizer.Tokenizer) -> str | None:
    """The first token that differs between two vocabularies; None if none does."""
    if first.vocab_size != second.vocab_size:
        return f"{second.vocab_size} tokens, not {first.vocab_size}"
    for token_id in range(first.vocab_size):
        texts = second.token_bytes(token_id), first.token_bytes(token_id)
        if texts[0] != texts[1]:
            return f"token {token_id} is {texts[0]!r}, not {texts[1]!r}"
    return None


def _say_problem(error: LLMCliError) -> None:
    terminal.warn(f"--draft: {error}; the run continues without drafts")


@dataclass(frozen=True)
class RunRequest:
    """The flags of a run, checked as far as possible without a model."""

    devices: RunnerOptions
    numbers: shared.Numbers
    preset: str | None
    flags: SamplerFlags
    stop_strings: tuple[str, ...]
    seed: int | None
    context: int | None
    draft: str = shared.AUTO
    adapters: tuple[shared.AdapterChoice, ...] = ()


def check_run(
    options: shared.RunOptions,
    numbers: shared.Numbers,
    sampler: shared.SamplerOptions,
    stop: Sequence[str] | None,
    *,
    ignore_eos: bool = False,
    timeline: Timeline | None = None,
) -> RunRequest:
    """Check the flags, and start the card meanwhile.

    Raises: UsageError for what is wrong with any model, DeviceError for a card that cannot be used.
    """
    timeline = timeline or Timeline()
    flags = parse_sampler_flags(sampler.logit_bias, sampler.sampler_order, sampler.dry_breaker, ignore_eos=ignore_eos)
    stop_strings = checked_stop_strings(stop)
    adapters = shared.parse_adapters(options.adapter)
    start_device(options.devices.device, timeline)
    with timeline.part("driver and CuPy"):
        devices = options.devices.checked()
    return RunRequest(
        devices, numbers, sampler.preset, flags, stop_strings, sampler.seed, options.context, options.draft, adapters
    )


@dataclass(frozen=True)
class LoadedRunner:
    """A model that is ready to run, the seconds of loading, and its drafter."""

    runner: lazy.runners.Runner
    load_seconds: float
    drafting: lazy.drafts.Drafting | None = None

    @property
    def draft_usage(self) -> lazy.drafts.DraftUsage | None:
        """What drafts have brought so far; None where nothing drafts."""
        return None if self.drafting is None else self.drafting.usage


@dataclass(frozen=True)
class Run:
    """A model whose files are checked, and how it is to run; `name` is the model as the command line names it."""

    name: str | None
    session: Session
    devices: RunnerOptions
    sampling: lazy.params.ResolvedSampling
    flags: SamplerFlags
    stop_strings: tuple[str, ...]
    seed: int
    context: int
    draft: Draft = Draft(OFF)

    @property
    def model(self) -> str:
        """The model's name in files and JSON."""
        return STORYTELLER if self.name is None else self.name

    def sampler(self, prompt: EncodedPrompt) -> lazy.params.Sampler:
        """The sampler of an answer to `prompt`. Raises: as `Session.sampler`."""
        return self.session.sampler(self.sampling.params, self.seed, prompt, self.flags)

    def limit_new_tokens(self, requested: int | None, prompt: EncodedPrompt) -> int | None:
        """How many tokens to generate after `prompt`, as `Session.limit_new_tokens`."""
        can_end = not self.flags.ignore_eos and self.session.can_end(prompt)
        return self.session.limit_new_tokens(requested, len(prompt.token_ids), self.context, can_end=can_end)

    def load(self, num_rows: int | None = 1, timeline: Timeline | None = None, *, host_rows: int = 1) -> LoadedRunner:
        """Read the weights, and report the device; `num_rows` and `host_rows` as for `device_choice.load_runner`.

        Raises: LLMCliError and its subclasses.
        """
        runner, load_seconds = self.session.load_runner(
            self.devices, self.context, num_rows, timeline, host_rows=host_rows
        )
        what = f"{self.session.name}: {runner.description}{self.devices.note}"
        terminal.info(f"{what}, context {self.context}, seed {self.seed}")
        return LoadedRunner(runner, load_seconds, self.draft.load(runner, self.devices, self.context))

    def facts(
        self,
        loaded: LoadedRunner,
        text: str,
        prompt: EncodedPrompt,
        samples: tuple[int, ...],
        stats: str | None,
        timeline: Timeline,
    ) -> RunFacts:
        """The facts that outputs need; `stats` is the value of --stats."""
        return RunFacts(
            model=self.model,
            name=self.session.name,
            prompt=text,
            lead="" if prompt.at_start else text,
            prompt_token_ids=prompt.token_ids,
            sampling=self.sampling,
            seed=self.seed,
            samples=samples,
            load_seconds=loaded.load_seconds,
            cache_type=loaded.runner.cache_type,
            draft_usage=loaded.draft_usage,
            tokenizer=self.session.tokenizer,
            timeline=timeline if stats == "start" else None,
            meter=_open_energy_meter(self.devices.card) if stats == "run" else None,
        )


@contextmanager
def loaded_objects_set_aside() -> Iterator[None]:
    """Freeze what is loaded for Python's collector, and collect the rest rarely.

    For runs with many rows: each step makes thousands of objects that are freed with it or the next without the
    collector. It would otherwise run several times a step.
    """
    usual = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_BETWEEN_LOOKS, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


def open_run(
    request: RunRequest, name: str | None, timeline: Timeline | None = None, *, holds_texts: bool = False
) -> Run:
    """Check the model's files, load its tokenizer and resolve everything that the flags leave unset.

    `holds_texts` as for `open_session`.
    Raises: CheckpointError and its subclasses, UsageError.
    """
    session = shared.with_adapters(open_session(name, timeline, holds_texts=holds_texts), request.adapters)
    sampling = session.resolve_sampling(request.numbers, request.preset, request.flags, request.stop_strings)
    stop_strings = session.resolve_stop_strings(request.stop_strings)
    session.say_what_is_not_applied()
    draft = open_draft(request.draft, session)
    return Run(
        name=name,
        session=session,
        devices=request.devices,
        sampling=sampling,
        flags=request.flags,
        stop_strings=stop_strings,
        seed=secrets.randbits(32) if request.seed is None else request.seed,
        context=session.resolve_context(request.context),
        draft=draft,
    )


def _open_energy_meter(card: int | None) -> lazy.energy.EnergyMeter | None:
    """The energy meter of a loaded, idle card, whose power it notes; None without a meter."""
    meter = lazy.energy.open_meter(card)
    if isinstance(meter, str):
        return None
    meter.sample_idle()
    return meter
