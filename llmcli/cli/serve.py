"""`llmcli serve`: the model for other programs, over OpenAI's protocol.

The bodies of requests become the engine's with the session's own functions, so a request gives the text of `generate`.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import typer

from llmcli.cli import lazy, shared
from llmcli.cli.command import option
from llmcli.cli.constrained_texts import KEPT_SCHEMAS, Schemas
from llmcli.cli.prompt import SamplerFlags, parse_template_variables
from llmcli.cli.run import OFF, Run, RunRequest, check_run, loaded_objects_set_aside, open_run
from llmcli.cli.session import EncodedPrompt
from llmcli.cli.settings import running
from llmcli.cli.terminal import OutputClosedError, json_line, terminal
from llmcli.cli.units import counted, size
from llmcli.errors import EXIT_INTERRUPTED, TokenizerError, UsageError
from llmcli.reading import API_KEY
from llmcli.resources import install_command
from llmcli.sampling.params import SamplingParams
from llmcli.serve.refusal import Refusal

server_option = partial(option, rich_help_panel="Server")
_MIB = 1024**2

# The CPU gains little from more rows; but a request should not wait for the end of a long text.
HOST_ROWS = 4


@dataclass(frozen=True)
class ServeOptions:
    """Where the server listens, who may connect, and the limits of a client.

    Raises: UsageError for values that cannot be.
    """

    model_argument: str | None = shared.model_argument()
    host: str = server_option("127.0.0.1", "Address to listen at.")
    port: int = server_option(8080, "Port to listen at; 0 picks one.", min=0, max=65535)
    rows: str = shared.rows_option(shared.AUTO)
    api_key: str | None = server_option(
        None, "Serve only who sends this key.", metavar="KEY", envvar=shared.KEY_VARIABLE, hide_input=True
    )
    api_key_file: Path | None = server_option(None, "Read the key from a file.")
    max_queue: int = server_option(512, "Texts that may wait for a row.", min=0)
    max_body: int = server_option(
        8, "Longest request, in MiB, up to 1024.", min=1, max=1024, metavar="MIB", hidden=True
    )
    timeout: float | None = server_option(
        None, "Longest time for an answer, waiting included.", min=0.1, metavar="SECONDS", show_default="no limit"
    )
    grace: float = server_option(30, "At the end, finish answers for this long.", min=0, metavar="SECONDS", hidden=True)
    cors_origin: list[str] | None = server_option(
        None,
        "Let pages of this site use the server, such as https://example.org; repeatable.",
        metavar="ORIGIN",
        hidden=True,
    )
    chat_template: str | None = shared.chat_template_option()
    template_var: list[str] | None = shared.template_var_option()
    log_contents: bool = shared.output_option(False, "Log prompts and answers too.", hidden=True)

    def __post_init__(self) -> None:
        shared.parse_rows(self.rows)
        parse_template_variables(self.template_var)
        # The variable is for all runs, so it does not conflict with a file.
        if self.api_key_file is not None and self.api_key is not None and "api_key" not in running.configured:
            raise UsageError("--api-key and --api-key-file cannot be combined")
        for origin in self.cors_origin or ():
            if origin != "*" and "://" not in origin:
                raise UsageError(f"--cors-origin is {origin!r}, expected an origin such as https://example.org")

    @property
    def max_body_bytes(self) -> int:
        """The longest request."""
        return self.max_body * _MIB

    def read_key(self) -> str | None:
        """The API key, None for none. Raises: UsageError for an empty one, and for a file that cannot be read"""
        if self.api_key_file is not None:
            key, source = API_KEY.read_text(self.api_key_file).removeprefix("\ufeff").strip(), str(self.api_key_file)
        elif self.api_key is not None:
            key = self.api_key
            source = shared.KEY_VARIABLE if key == os.environ.get(shared.KEY_VARIABLE) else "--api-key"
        else:
            return None
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise UsageError(f"{source} holds no usable key, expected visible ASCII characters without spaces")
        return key

    def listen(self, *, has_key: bool) -> tuple[socket.socket, bool]:
        """A socket bound to host and port, and whether only this machine reaches it; it does not accept clients yet.

        Raises: UsageError for an address that cannot be used, and for one that others reach without a key.
        """
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except (OSError, UnicodeError) as error:
            raise UsageError(f"--host is {self.host!r}, which has no address: {error}") from error
        family, _, _, _, address = found[0]
        is_local = ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
        if not (is_local or has_key):
            raise UsageError(
                f"others can reach {self.host}: add --api-key-file or {shared.KEY_VARIABLE}, or use --host 127.0.0.1"
            )
        try:
            listener = socket.create_server(address[:2], family=family)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)  # Python's text says the address again
            remedy = "--host" if error.errno == errno.EADDRNOTAVAIL else "--port"
            raise UsageError(
                f"cannot listen at {self.host} port {self.port}: {reason}; choose another {remedy}"
            ) from error
        return listener, is_local


Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class SessionModel:
    """A `ServedModel`. `seed` and `max_new_tokens` are for requests without them."""

    run: Run
    seed: int | None
    max_new_tokens: int | None
    chat_template: str | None
    template_variables: Mapping[str, Any]
    _grammars: dict[tuple[str, str, str], lazy.grammar.Grammar] = field(default_factory=dict)

    @property
    def names(self) -> Sequence[str]:
        """The model's name, and as the command line names it."""
        return tuple(dict.fromkeys((self.run.session.name, self.run.model)))

    @property
    def context(self) -> int:
        """Tokens of prompt and new text together."""
        return self.run.context

    @property
    def tokenizer(self) -> lazy.tokenizer.Tokenizer:
        """The model's tokenizer."""
        return self.run.session.tokenizer

    def answer(self, body: lazy.bodies.ChatBody) -> lazy.service.Asked:
        """Texts that answer a conversation. Raises: UsageError, TokenizerError, Refusal"""
        prompt = self._encode_messages(body.messages, body.chat_template_kwargs, body.offered)
        start = prompt.answer_start(is_held=body.constraint is not None)
        try:
            constraint = prompt.held_to(body.constraint)
        except UsageError as error:
            raise Refusal(400, str(error), param="tools") from error
        return lazy.service.Asked(self._request(body, "messages", prompt), constraint, start, prompt.offer)

    def completion(self, body: lazy.bodies.CompletionBody, prompt: str | Sequence[int]) -> lazy.request.Request:
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

    def grammar(self, constraint: lazy.constraint.Constraint) -> lazy.grammar.Grammar:
        """The grammar of texts. Raises: UsageError, TokenizerError"""
        key = constraint.kind, constraint.key, json.dumps(constraint.value)
        if key not in self._grammars:
            while len(self._grammars) >= KEPT_SCHEMAS:
                del self._grammars[next(iter(self._grammars))]
            self._grammars[key] = self._grammar_process.grammar(constraint)
        return self._grammars[key]

    def encode(self, prompt: str | Messages) -> Sequence[int]:
        """The token ids of a prompt or a conversation. Raises: UsageError, TokenizerError"""
        encoded = self._encode_text(prompt) if isinstance(prompt, str) else self._encode_messages(prompt)
        return encoded.token_ids

    @cached_property
    def _grammar_process(self) -> lazy.grammar.GrammarProcess:
        return lazy.grammar.GrammarProcess()

    def _encode_text(self, prompt: str) -> EncodedPrompt:
        self._check_length("prompt", [prompt])
        return self.run.session.encode_prompt(prompt)

    @cached_property
    def _encode_messages(self) -> Callable[..., EncodedPrompt]:
        template, ends = self.run.session.open_template(self.chat_template, self.template_variables)
        encode_messages = self.run.session.message_encoder(template, ends)

        def encode(
            messages: Messages, variables: Mapping[str, Any] | None = None, tools: lazy.tools.Tools | None = None
        ) -> EncodedPrompt:
            texts = [text for message in messages for text in message.values()]
            self._check_length("messages", [text if isinstance(text, str) else json.dumps(text) for text in texts])
            key = "chat_template_kwargs"
            self._check_length(key, [json.dumps(variables)])
            self._check_length("tools", [json.dumps(tools.tools)] if tools else [])
            try:
                template.refuse_unknown(variables or (), key)
                key = "tools"
                if tools is not None:
                    lazy.tool_offer.Offer.of(tools, template)
                key = "messages"
                return encode_messages(messages, variables, tools)
            except (UsageError, TokenizerError) as error:  # clients need not know where the template lies
                message = str(error).replace(template.origin, "the chat template")
                raise Refusal(400, message, param=key) from error

        return encode

    def _request(self, body: lazy.bodies.TextsBody, key: str, prompt: EncodedPrompt) -> lazy.request.Request:
        """The engine's request for the prompt under `key`."""
        session, run = self.run.session, self.run
        assert body.seed is not None
        self._check_ids("logit_bias", body.logit_bias)
        biases = {**run.flags.logit_bias, **body.logit_bias}
        flags = replace(run.flags, logit_bias=biases, ignore_eos=run.flags.ignore_eos or body.ignore_eos)
        params = SamplingParams(**{**vars(run.sampling.params), **body.sampling})
        return session.request(
            prompt,
            session.sampler(params, body.seed, prompt, flags),
            samples=tuple(range(body.n)),
            max_new_tokens=self._limit(body, key, prompt, flags),
            stop_strings=tuple(body.stop) or run.stop_strings,
            num_alternatives=body.num_alternatives,
        )

    def _limit(self, body: lazy.bodies.TextsBody, key: str, prompt: EncodedPrompt, flags: SamplerFlags) -> int | None:
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
        return replace(self.run, flags=flags).limit_new_tokens(wanted, prompt)

    def _check_length(self, key: str, texts: Sequence[str]) -> None:
        """Refuse texts too long for the context before they are encoded, which takes a second per megabyte."""
        num_bytes = sum(len(text.encode(errors="replace")) for text in texts)
        if num_bytes > self.context and (least := num_bytes // self.tokenizer.longest_token) > self.context:
            message = f"the prompt has at least {least} tokens; the context limit is {self.context}; shorten the prompt"
            raise Refusal(400, message, param=key)

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


def serve(
    *,
    server: ServeOptions,
    options: shared.RunOptions,
    stopping: shared.StoppingOptions,
    numbers: shared.SamplingNumbers,
    sampler: shared.SamplerOptions,
    messages: shared.MessageOptions,
) -> None:
    """Serve a model to other programs over OpenAI's protocol.

    What a request leaves out comes from these options. The same seed gives the text of `generate`.

    Examples:

    llmcli serve my-model --port 8080

    llmcli serve my-model --host 0.0.0.0 --api-key-file key
    """
    try:
        _ = lazy.server.Server
    except ModuleNotFoundError as error:
        raise UsageError(f"serve needs the package {error.name}: run `{install_command('llmcli[serve]')}`") from error
    request = check_run(options, numbers, sampler, stopping.stop, ignore_eos=stopping.ignore_eos)
    key = server.read_key()
    listener, is_local = server.listen(has_key=key is not None)
    with listener:
        host, port = listener.getsockname()[:2]
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        name = shared.model_or_default(shared.chosen_model(server.model_argument, options.model))
        run = open_run(request, name)
        if server.chat_template is not None or server.template_var:  # else a model without one completes prompts
            template, _ = run.session.open_template(server.chat_template, parse_template_variables(server.template_var))
            template.close()
        num_rows = shared.parse_rows(server.rows)
        work = lazy.front.FrontWork(
            partial(
                open_served_model, request, name, stopping.max_new_tokens, server.chat_template, server.template_var
            ),
            lazy.front.ServerOptions(
                max_waiting=server.max_queue,
                limits=lazy.service.ClientLimits(server.max_body_bytes, server.timeout),
                grace_seconds=server.grace,
                api_key=key,
                hosts=(*lazy.app.LOOPBACK_NAMES, server.host.lower()) if is_local else (),
                origins=server.cors_origin or (),
                logs_contents=server.log_contents,
            ),
        )
        with lazy.server.Server(listener, work) as front:
            runner, _ = run.session.load_runner(run.devices, run.context, num_rows, host_rows=num_rows or HOST_ROWS)
            drafting = run.draft.load(runner, run.devices, run.context)
            scheduler = lazy.scheduler.Scheduler(runner, run.session.tokenizer, drafting=drafting)
            _serve(front, scheduler, run, _start_line(run.session.name, runner, run.context, address))


def _serve(front: lazy.server.Server, scheduler: lazy.scheduler.Scheduler, run: Run, start_line: str) -> None:
    """Serve to the end. Raises: typer.Exit; LLMCliError if the front process ends early"""
    log = lazy.server.LogWriter(_write_line)
    try:
        with loaded_objects_set_aside():
            signals = front.run(
                scheduler,
                Schemas(run.session).hold,
                log=lambda line: log.log(_log_line(line)),
                log_contents=lambda what, contents: log.log(_log_line(f"{what} {json_line(contents)}")),
                on_ready=lambda: log.log(start_line),
            )
    finally:
        is_log_read = log.close()
    code = EXIT_INTERRUPTED if signal.SIGINT in signals else 0
    if not is_log_read:
        os._exit(code)  # Python's own exit would wait for the same lock
    raise typer.Exit(code)


def _start_line(name: str, runner: lazy.runners.Runner, context: int, address: str) -> str:
    limits = runner.limits
    num_tokens = limits.num_pages * lazy.runners.PAGE_TOKENS
    cache = f"KV cache {size(limits.cache_bytes)} for {num_tokens} tokens in {runner.cache_type}"
    memory = f"weights {size(limits.weight_bytes)} + {cache}"
    rows = counted(limits.num_rows, "row")
    return f"Serving {name} at {address}: {runner.description}, {rows}, context {context}, {memory}"


def _write_line(line: str) -> None:
    with suppress(OutputClosedError):  # stderr has no reader; clients are served anyway
        terminal.info(line)


def _log_line(line: str) -> str:
    return f"{time.strftime('%H:%M:%S')} {' '.join(line.split())}"
