"""The options of `llmcli serve` that other commands do not have."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from llmcli.cli.options import (
    AUTO,
    KEY_VARIABLE,
    OUTPUT_PANEL,
    ChatTemplateOption,
    ModelArgument,
    RowsOption,
    TemplateVarOption,
    parse_rows,
)
from llmcli.cli.prompt import parse_template_variables
from llmcli.errors import UsageError
from llmcli.reading import API_KEY

SERVER_PANEL = "Server"
_MIB = 1024**2


@dataclass(frozen=True)
class ServeOptions:
    """Where the server listens, whom it lets in, and what a client may take.

    Raises: UsageError for values that cannot be.
    """

    model_argument: ModelArgument = None
    host: Annotated[
        str, typer.Option("--host", metavar="HOST", help="Address to listen at.", rich_help_panel=SERVER_PANEL)
    ] = "127.0.0.1"
    port: Annotated[
        int,
        typer.Option(
            "--port",
            min=0,
            max=65535,
            metavar="N",
            help="Port to listen at; 0 picks one.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = 8080
    rows: RowsOption = AUTO
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            envvar=KEY_VARIABLE,
            help="Serve only who sends this key.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            readable=False,
            metavar="FILE",
            help="Read the key from a file.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None
    max_queue: Annotated[
        int,
        typer.Option(
            "--max-queue", min=0, metavar="N", help="Texts that may wait for a row.", rich_help_panel=SERVER_PANEL
        ),
    ] = 512
    max_body: Annotated[
        int,
        typer.Option(
            "--max-body",
            min=1,
            max=1024,
            metavar="MIB",
            help="Longest request, in MiB.",
            hidden=True,
            rich_help_panel=SERVER_PANEL,
        ),
    ] = 8
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            min=0.1,
            metavar="SECONDS",
            help="Longest time for an answer, waiting included.",
            show_default="no limit",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None
    grace: Annotated[
        float,
        typer.Option(
            "--grace",
            min=0,
            metavar="SECONDS",
            help="At the end, finish answers for this long.",
            hidden=True,
            rich_help_panel=SERVER_PANEL,
        ),
    ] = 30
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--cors-origin",
            metavar="ORIGIN",
            help="Let pages of this site use the server, such as https://example.org; repeatable.",
            hidden=True,
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None
    chat_template: ChatTemplateOption = None
    template_var: TemplateVarOption = None
    log_contents: Annotated[
        bool,
        typer.Option("--log-contents", help="Log prompts and answers too.", hidden=True, rich_help_panel=OUTPUT_PANEL),
    ] = False

    def __post_init__(self) -> None:
        parse_rows(self.rows)
        parse_template_variables(self.template_var)
        # The variable is for all runs, so it is no question for one with a file.
        if self.api_key_file is not None and self.api_key not in (None, os.environ.get(KEY_VARIABLE)):
            raise UsageError("--api-key and --api-key-file cannot be combined")
        for origin in self.cors_origin or ():
            if origin != "*" and "://" not in origin:
                raise UsageError(f"--cors-origin is {origin!r}, expected an origin such as https://example.org")

    @property
    def max_body_bytes(self) -> int:
        """The longest request."""
        return self.max_body * _MIB

    def read_key(self) -> str | None:
        """The API key, None for none.

        Raises: UsageError for an empty one, and for a file that cannot be read.
        """
        if self.api_key_file is not None:
            key, source = API_KEY.read_text(self.api_key_file).removeprefix("\ufeff").strip(), str(self.api_key_file)
        elif self.api_key is not None:
            key = self.api_key
            source = KEY_VARIABLE if key == os.environ.get(KEY_VARIABLE) else "--api-key"
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
                f"others can reach {self.host}: add --api-key-file or {KEY_VARIABLE}, or use --host 127.0.0.1"
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
