"""Lines become requests with the session's own functions, so a line gives the text of `generate`.

Line k has the run's seed and sample index k - 1, as `generate --only k`. A line with a seed of its own has index 0, as
`generate --seed` alone. A call of `llmcli.load`'s model is a line, too.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from llmcli.batch.input import Line
from llmcli.cli import lazy
from llmcli.cli.constrained_texts import Schemas
from llmcli.cli.prompt import SamplerFlags
from llmcli.cli.run import Run, RunRequest
from llmcli.cli.session import EncodedPrompt
from llmcli.cli.terminal import terminal
from llmcli.errors import UsageError
from llmcli.schema.constraint import Constraint


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt that is checked and encoded. `line` has lost its text; `token_ids` take four bytes each."""

    line: Line
    token_ids: Sequence[int]
    prompt: EncodedPrompt  # without text and ids
    max_new_tokens: int | None
    grammar: lazy.grammar.Grammar | None = None

    def message(self, event: lazy.request.Finished, seed: int) -> dict[str, Any]:
        """The text as a message of an answer: what it reasons, says and calls."""
        origin = tuple(self.token_ids), seed, event.sample
        return self.prompt.message(event.text, is_held=self.grammar is not None, origin=origin)


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Turns lines into tasks, and tasks into requests. What a line leaves out comes from the run, or from here."""

    run: Run
    request: RunRequest
    max_new_tokens: int | None = None
    grammar: lazy.grammar.Grammar | None = None
    system: str | None = None
    chat_template: str | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    _resolved: dict[tuple[tuple[str, int | float], ...], lazy.params.ResolvedSampling] = field(default_factory=dict)
    _grammars: dict[tuple[str, str], lazy.grammar.Grammar] = field(default_factory=dict)

    @cached_property
    def _schemas(self) -> Schemas:
        return Schemas(self.run.session)

    @cached_property
    def encode_messages(self) -> Callable[..., EncodedPrompt]:
        """The encoder of conversations. Raises: as `Session.open_template`"""
        session = self.run.session
        return session.message_encoder(*session.open_template(self.chat_template, self.template_variables))

    def request_of(self, task: Task, run_seed: int) -> lazy.request.Request:
        """What to generate for a task."""
        return self._schemas.hold(*self.asked_of(task, run_seed))

    def asked_of(self, task: Task, run_seed: int) -> tuple[lazy.request.Request, lazy.grammar.Grammar | None]:
        """What to generate for a task, and the grammar that its text is to be held to."""
        prompt = replace(task.prompt, token_ids=tuple(task.token_ids))
        line = task.line
        seed, sample = (run_seed, line.number - 1) if line.seed is None else (line.seed, 0)
        sampler = self.run.session.sampler(self._sampling(line.sampling).params, seed, prompt, self._flags(line))
        request = self.run.session.request(
            prompt,
            sampler,
            samples=(sample,),
            max_new_tokens=task.max_new_tokens,
            stop_strings=line.stop or self.run.stop_strings,
        )
        return request, task.grammar

    def task(self, line: Line) -> Task:
        """Check and encode a line. Raises: UsageError, TokenizerError"""
        requested = self.max_new_tokens if line.max_new_tokens is None else line.max_new_tokens
        if line.messages is not None:
            prompt = self.encode_messages(self._with_system(line.messages), line.template_kwargs, line.tools)
        else:
            assert line.prompt is not None
            prompt = self.run.session.encode_prompt(line.prompt)
        limit = self.run.limit_new_tokens(requested, prompt)
        packed = array("I", prompt.token_ids)
        constraint = prompt.held_to(line.constraint)
        if line.tools is not None and line.constraint is None and self.grammar is not None:
            raise UsageError(f"tools and {self.grammar.name} cannot be combined")
        grammar = self.grammar if constraint is None else self._grammar(constraint)
        line = replace(line, prompt=None, messages=None, template_kwargs={}, tools=None, constraint=None)
        task = Task(line, packed, replace(prompt, text="", token_ids=()), limit, grammar)
        if line.sampling or line.logit_bias or grammar is not None:  # those of the run are checked once
            request = self.request_of(replace(task, grammar=None), 0)
            self._schemas.prepare(grammar, request.sampler)
        return task

    def _grammar(self, constraint: Constraint) -> lazy.grammar.Grammar:
        """A line's grammar; equal ones are read once. Raises: UsageError"""
        key = constraint.kind, json.dumps(constraint.value)
        if key not in self._grammars:
            self._grammars[key] = grammar = lazy.grammar.grammar_of(constraint)
            for note in grammar.notes if constraint.kind == "tools" else ():
                terminal.info(note)
        return self._grammars[key]

    def _with_system(self, messages: Sequence[Mapping[str, str]]) -> Sequence[Mapping[str, str]]:
        """The messages after the run's system prompt, unless they have their own."""
        if self.system is None or any(message["role"] == "system" for message in messages):
            return messages
        return [{"role": "system", "content": self.system}, *messages]

    def _flags(self, line: Line) -> SamplerFlags:
        flags = self.run.flags
        if not line.logit_bias:
            return flags
        vocab_size = self.run.session.model.config.vocab_size
        if (largest := max(line.logit_bias)) >= vocab_size:
            raise UsageError(f"logit_bias names token {largest}, expected 0 to {vocab_size - 1}")
        return replace(flags, logit_bias={**flags.logit_bias, **line.logit_bias})

    def _sampling(self, own: Mapping[str, int | float]) -> lazy.params.ResolvedSampling:
        if not own:
            return self.run.sampling
        key = tuple(sorted(own.items()))
        if key not in self._resolved:
            numbers = {**self.request.numbers, **own}
            self._resolved[key] = self.run.session.resolve_sampling(numbers, self.request.preset, self.run.flags)
        return self._resolved[key]
