"""`llmcli serve`: the model for other programs, over OpenAI's protocol."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import typer

from llmcli.cli import lazy
from llmcli.cli.command import with_groups
from llmcli.cli.held_texts import Schemas
from llmcli.cli.options import (
    ManyRowsRunOptions,
    MessageOptions,
    SamplerOptions,
    SamplingNumbers,
    StoppingOptions,
    chosen_model,
    parse_rows,
)
from llmcli.cli.prompt import parse_template_variables
from llmcli.cli.run import Run, check_run, loaded_objects_set_aside, open_run
from llmcli.cli.serve_options import ServeOptions
from llmcli.cli.served_model import open_served_model
from llmcli.cli.terminal import OutputClosedError, json_line, terminal
from llmcli.cli.units import size
from llmcli.errors import EXIT_INTERRUPTED, UsageError

if TYPE_CHECKING:
    from llmcli.engine.scheduler import Scheduler
    from llmcli.runners.base import Runner
    from llmcli.serve.server import Server

# The CPU gains little from more rows; but who asks while a long text runs should not wait for its end.
HOST_ROWS = 4


@with_groups
def serve(
    *,
    server: ServeOptions,
    options: ManyRowsRunOptions,
    stopping: StoppingOptions,
    numbers: SamplingNumbers,
    sampler: SamplerOptions,
    messages: MessageOptions,
) -> None:
    """Serve a model to other programs over OpenAI's protocol.

    What a request leaves out comes from these options. The same seed gives the text of `generate`,
    except with --speed-first.

    Examples:

    llmcli serve my-model --port 8080

    llmcli serve my-model --host 0.0.0.0 --api-key-file key
    """
    _require_packages()
    request = check_run(options, numbers, sampler, stopping.stop, ignore_eos=stopping.ignore_eos)
    key = server.read_key()
    listener, is_local = server.listen(has_key=key is not None)
    with listener:
        address = _address(listener)
        name = chosen_model(server.model_argument, options.model)
        run = open_run(request, name)
        if server.chat_template is not None or server.template_var:  # else a model without one completes prompts
            template, _ = run.session.open_template(server.chat_template, parse_template_variables(server.template_var))
            template.close()
        num_rows = parse_rows(server.rows)
        work = lazy.FrontWork(
            partial(
                open_served_model, request, name, stopping.max_new_tokens, server.chat_template, server.template_var
            ),
            lazy.ServerOptions(
                max_waiting=server.max_queue,
                limits=lazy.Limits(server.max_body_bytes, server.timeout),
                grace_seconds=server.grace,
                api_key=key,
                hosts=(*lazy.LOOPBACK_NAMES, server.host.lower()) if is_local else (),
                origins=server.cors_origin or (),
                logs_contents=server.log_contents,
            ),
        )
        with lazy.Server(listener, work) as front:
            runner, _ = run.session.load_runner(run.devices, run.context, num_rows, host_rows=num_rows or HOST_ROWS)
            drafting = run.draft.load(runner, run.devices, run.context)
            scheduler = lazy.Scheduler(runner, run.session.tokenizer, drafting=drafting)
            _serve(front, scheduler, run, _start_line(run.session.name, runner, run.context, address))


def _serve(front: Server, scheduler: Scheduler, run: Run, start_line: str) -> None:
    """Serve to the end. Raises: typer.Exit; LLMCliError if the front ends by itself"""
    log = lazy.LogWriter(_write_line)
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
        os._exit(code)  # Python's own end would wait for the same lock
    raise typer.Exit(code)


def _require_packages() -> None:
    """Raises: UsageError where the extra is not installed."""
    try:
        _ = lazy.Server
    except ModuleNotFoundError as error:
        raise UsageError(f"serve needs the package {error.name}: run `pip install 'llmcli[serve]'`") from error


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _start_line(name: str, runner: Runner, context: int, address: str) -> str:
    limits = runner.limits
    rows = "1 row" if limits.num_rows == 1 else f"{limits.num_rows} rows"
    cache = (
        f"KV cache {size(limits.cache_bytes)} for {limits.num_pages * lazy.PAGE_TOKENS} tokens in {runner.cache_type}"
    )
    memory = f"weights {size(limits.weight_bytes)} + {cache}"
    return f"Serving {name} at {address}: {runner.description}, {rows}, context {context}, {memory}"


def _write_line(line: str) -> None:
    with suppress(OutputClosedError):  # nobody reads; clients are served all the same
        terminal.info(line)


def _log_line(line: str) -> str:
    return f"{time.strftime('%H:%M:%S')} {' '.join(line.split())}"
