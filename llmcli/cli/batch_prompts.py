"""From the lines of a batch to requests, with the session's own functions, so that a line tells what `generate` tells.

Line k has the run's seed and sample index k - 1, as `generate --only k`. A line with a seed of its own has index 0, as
`generate --seed` alone.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from llmcli.batch.input import Problems, read_input
from llmcli.batch.lines import LineReader
from llmcli.batch.values import Line
from llmcli.cli import lazy
from llmcli.cli.batch_options import BatchOptions
from llmcli.cli.held_texts import Schemas
from llmcli.cli.prompt import SamplerFlags, parse_template_variables
from llmcli.cli.run import Run, RunRequest
from llmcli.cli.session import EncodedPrompt, Session
from llmcli.errors import TokenizerError, UsageError
from llmcli.schema.held_to import HeldTo

if TYPE_CHECKING:
    from llmcli.engine.request import Request
    from llmcli.sampling.params import ResolvedSampling
    from llmcli.schema.grammar import Grammar


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt that is checked and encoded. `line` has lost its text; `token_ids` take four bytes each."""

    line: Line
    token_ids: Sequence[int]
    prompt: EncodedPrompt  # without text and ids
    max_new_tokens: int | None
    grammar: Grammar | None = None


@dataclass(frozen=True)
class Prompts:
    """Turns lines into tasks, and tasks into requests."""

    run: Run
    request: RunRequest
    options: BatchOptions
    max_new_tokens: int | None
    grammar: Grammar | None = None
    _resolved: dict[tuple[tuple[str, int | float], ...], ResolvedSampling] = field(default_factory=dict)
    _grammars: dict[tuple[str, str], Grammar] = field(default_factory=dict)

    @property
    def _session(self) -> Session:
        return self.run.session

    @cached_property
    def _schemas(self) -> Schemas:
        return Schemas(self._session)

    @cached_property
    def _encode_messages(self) -> Callable[[Sequence[Mapping[str, str]]], EncodedPrompt]:
        variables = parse_template_variables(self.options.template_var)
        return self._session.message_encoder(*self._session.open_template(self.options.chat_template, variables))

    def read(self, reader: LineReader, problems: Problems, on_read: Callable[[int], None]) -> list[Task]:
        """Every prompt of a file. What is wrong with one is noted in `problems`; `on_read` gets the bytes so far.

        Raises: UsageError for what is wrong with all of them, such as a missing chat template.
        """
        # Flags that no sampler could follow are no problem of a line.
        self.run.sampler(EncodedPrompt("", (), at_start=False))
        tasks = []
        has_messages = False
        names = (self.run.model, self._session.name)
        for line in read_input(reader, names, problems, is_text=self.options.text):
            on_read(reader.num_bytes)
            if line.messages is not None:
                has_messages = True
                _ = self._encode_messages  # a template that is missing is no problem of this line
            try:
                tasks.append(self._task(line))
            except (UsageError, TokenizerError) as error:
                problems.add(reader.name, line.number, error)
        if not problems.count and not has_messages:
            options = self.options
            if options.system is not None or options.chat_template is not None or options.template_var:
                flags = "--system, --chat-template and --template-var"
                raise UsageError(f"{flags} are for lines with messages; {reader.name} has none")
            if not tasks:
                raise UsageError(f"{reader.name} holds no prompts")
        return tasks

    def request_of(self, task: Task, run_seed: int) -> Request:
        """What to generate for a task."""
        prompt = replace(task.prompt, token_ids=tuple(task.token_ids))
        line = task.line
        seed, sample = (run_seed, line.number - 1) if line.seed is None else (line.seed, 0)
        sampler = self._session.sampler(self._sampling(line.sampling).params, seed, prompt, self._flags(line))
        request = self._session.request(
            prompt,
            sampler,
            samples=(sample,),
            max_new_tokens=task.max_new_tokens,
            stop_strings=line.stop or self.run.stop_strings,
        )
        return self._schemas.hold(request, task.grammar)

    def _task(self, line: Line) -> Task:
        requested = self.max_new_tokens if line.max_new_tokens is None else line.max_new_tokens
        if line.messages is not None:
            prompt = self._encode_messages(self._with_system(line.messages))
        else:
            assert line.prompt is not None
            prompt = self._session.encode_prompt(line.prompt)
        can_end = not self.request.flags.ignore_eos and self._session.can_end(prompt)
        limit = self._session.limit_new_tokens(requested, len(prompt.token_ids), self.run.context, can_end=can_end)
        packed = array("I", prompt.token_ids)
        grammar = self.grammar if line.held_to is None else self._grammar(line.held_to)
        line = replace(line, prompt=None, messages=None, held_to=None)
        task = Task(line, packed, replace(prompt, text="", token_ids=()), limit, grammar)
        if line.sampling or line.logit_bias or grammar is not None:  # those of the run are checked once
            request = self.request_of(replace(task, grammar=None), 0)
            self._schemas.prepare(grammar, request.sampler)
        return task

    def _grammar(self, held_to: HeldTo) -> Grammar:
        """What a line is held to; equal ones are read once. Raises: UsageError"""
        key = held_to.kind, json.dumps(held_to.value)
        if key not in self._grammars:
            self._grammars[key] = lazy.grammar_of(held_to)
        return self._grammars[key]

    def _with_system(self, messages: Sequence[Mapping[str, str]]) -> Sequence[Mapping[str, str]]:
        """The messages behind the run's system prompt, unless they have one."""
        if self.options.system is None or any(message["role"] == "system" for message in messages):
            return messages
        return [{"role": "system", "content": self.options.system}, *messages]

    def _flags(self, line: Line) -> SamplerFlags:
        flags = self.run.flags
        if not line.logit_bias:
            return flags
        vocab_size = self._session.model.config.vocab_size
        if (largest := max(line.logit_bias)) >= vocab_size:
            raise UsageError(f"logit_bias names token {largest}, expected 0 to {vocab_size - 1}")
        return replace(flags, logit_bias={**flags.logit_bias, **line.logit_bias})

    def _sampling(self, own: Mapping[str, int | float]) -> ResolvedSampling:
        if not own:
            return self.run.sampling
        key = tuple(sorted(own.items()))
        if key not in self._resolved:
            numbers = {**self.request.numbers, **own}
            self._resolved[key] = self._session.resolve_sampling(numbers, self.request.preset, self.run.flags)
        return self._resolved[key]
