"""From the bodies of requests to the engine's, with the session's own functions, so that a request tells what
`generate` tells.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from llmcli.cli import lazy
from llmcli.cli.draft import OFF
from llmcli.cli.held_texts import KEPT_SCHEMAS
from llmcli.cli.run import Run, RunRequest, open_run
from llmcli.cli.sampler_flags import SamplerFlags
from llmcli.cli.session import EncodedPrompt
from llmcli.cli.template_variables import parse_template_variables
from llmcli.errors import TokenizerError
from llmcli.sampling.params import SamplingParams
from llmcli.serve.refusal import Refusal

if TYPE_CHECKING:
    from llmcli.engine.request import Request
    from llmcli.schema.grammar import Grammar
    from llmcli.schema.grammar_process import GrammarProcess
    from llmcli.schema.held_to import HeldTo
    from llmcli.serve.bodies import ChatBody, CompletionBody, TextsBody
    from llmcli.tokenizer.base import Tokenizer

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class SessionModel:
    """A `ServedModel`. `seed` and `max_new_tokens` are for requests that give none."""

    run: Run
    seed: int | None
    max_new_tokens: int | None
    chat_template: str | None
    template_variables: Mapping[str, Any]
    _grammars: dict[tuple[str, str, str], Grammar] = field(default_factory=dict)

    @property
    def names(self) -> Sequence[str]:
        """The model's name, and as the command line names it."""
        return tuple(dict.fromkeys((self.run.session.name, self.run.model)))

    @property
    def context(self) -> int:
        """Tokens of prompt and new text together."""
        return self.run.context

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.run.session.tokenizer

    def answer(self, body: ChatBody) -> Request:
        """Texts that answer a conversation. Raises: UsageError, TokenizerError, Refusal"""
        prompt = self._encode_messages(body.messages)
        return self._request(body, "messages", prompt)

    def completion(self, body: CompletionBody, prompt: str | Sequence[int]) -> Request:
        """Texts that continue a prompt. Raises: UsageError, Refusal"""
        if isinstance(prompt, str):
            encoded = self._encode_text(prompt)
        else:
            self._check_ids("prompt", prompt)
            special = self.tokenizer.special_token_ids
            is_empty = all(token_id in special for token_id in prompt)
            encoded = EncodedPrompt("", tuple(prompt), at_start=is_empty)
        scores_prompt = body.echo and body.logprobs is not None and len(encoded.token_ids) > 1
        return replace(self._request(body, "prompt", encoded), scores_prompt=scores_prompt)

    def grammar(self, held_to: HeldTo) -> Grammar:
        """What texts are held to. Raises: UsageError, TokenizerError"""
        key = held_to.kind, held_to.key, json.dumps(held_to.value)
        if key not in self._grammars:
            while len(self._grammars) >= KEPT_SCHEMAS:
                del self._grammars[next(iter(self._grammars))]
            self._grammars[key] = self._grammar_process.grammar(held_to)
        return self._grammars[key]

    def encode(self, prompt: str | Messages) -> Sequence[int]:
        """The token ids of a prompt or a conversation. Raises: UsageError, TokenizerError"""
        encoded = self._encode_text(prompt) if isinstance(prompt, str) else self._encode_messages(prompt)
        return encoded.token_ids

    @cached_property
    def _grammar_process(self) -> GrammarProcess:
        return lazy.GrammarProcess()

    def _encode_text(self, prompt: str) -> EncodedPrompt:
        self._check_length("prompt", [prompt])
        return self.run.session.encode_prompt(prompt)

    @cached_property
    def _encode_messages(self) -> Callable[[Messages], EncodedPrompt]:
        template, ends = self.run.session.open_template(self.chat_template, self.template_variables)
        encode_messages = self.run.session.message_encoder(template, ends)

        def encode(messages: Messages) -> EncodedPrompt:
            self._check_length("messages", [text for message in messages for text in message.values()])
            try:
                return encode_messages(messages)
            except TokenizerError as error:  # where the template lies is no client's business
                message = str(error).replace(template.origin, "the chat template")
                raise Refusal(400, message, param="messages") from error

        return encode

    def _request(self, body: TextsBody, key: str, prompt: EncodedPrompt) -> Request:
        """Of the prompt that was given under `key`."""
        session, run = self.run.session, self.run
        assert body.seed is not None
        flags = replace(run.flags, logit_bias=self._biases(body), ignore_eos=run.flags.ignore_eos or body.ignore_eos)
        params = SamplingParams(**{**vars(run.sampling.params), **body.sampling})
        return session.request(
            prompt,
            session.sampler(params, body.seed, prompt, flags),
            samples=tuple(range(body.n)),
            max_new_tokens=self._limit(body, key, prompt, flags),
            stop_strings=tuple(body.stop) or run.stop_strings,
            num_alternatives=body.num_alternatives,
        )

    def _limit(self, body: TextsBody, key: str, prompt: EncodedPrompt, flags: SamplerFlags) -> int | None:
        num_tokens, context = len(prompt.token_ids), self.run.context
        room, wanted = context - num_tokens, body.max_new_tokens
        is_full = room < (1 if wanted is None else min(wanted, 1))
        if is_full or (wanted is not None and wanted > room):
            more = "" if wanted is None else f" and {wanted} new tokens are requested"
            remedy = "shorten the prompt" if is_full else f"request at most {room}"
            limit_key = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
            message = f"the prompt has {num_tokens} tokens{more}; the context limit is {context}; {remedy}"
            raise Refusal(400, message, param=key if is_full else limit_key)
        if wanted is None and self.max_new_tokens is not None:
            wanted = min(self.max_new_tokens, room)
        can_end = not flags.ignore_eos and self.run.session.can_end(prompt)
        return self.run.session.limit_new_tokens(wanted, num_tokens, context, can_end=can_end)

    def _check_length(self, key: str, texts: Sequence[str]) -> None:
        """Refuse texts too long for the context before they are encoded, which takes a second per megabyte."""
        num_bytes = sum(len(text.encode(errors="replace")) for text in texts)
        if num_bytes > self.context and (least := num_bytes // self.tokenizer.longest_token) > self.context:
            message = f"the prompt has at least {least} tokens; the context limit is {self.context}; shorten the prompt"
            raise Refusal(400, message, param=key)

    def _biases(self, body: TextsBody) -> Mapping[int, float]:
        self._check_ids("logit_bias", body.logit_bias)
        return {**self.run.flags.logit_bias, **body.logit_bias}

    def _check_ids(self, key: str, token_ids: Sequence[int] | Mapping[int, float]) -> None:
        vocab_size = self.run.session.model.config.vocab_size
        if not token_ids and key == "prompt":
            raise Refusal(400, "prompt is an empty list of token ids, expected at least one", param=key)
        if token_ids and (largest := max(token_ids)) >= vocab_size:
            raise Refusal(400, f"{key} names token {largest}, expected 0 to {vocab_size - 1}", param=key)


def open_served_model(
    request: RunRequest,
    name: str | None,
    max_new_tokens: int | None,
    chat_template: str | None,
    template_variables: Sequence[str] | None,
) -> SessionModel:
    """The model `name` as the flags of `request` serve it. Raises: as `open_run`"""
    variables = parse_template_variables(template_variables)
    run = open_run(replace(request, draft=OFF), name)
    return SessionModel(run, request.seed, max_new_tokens, chat_template, variables)
