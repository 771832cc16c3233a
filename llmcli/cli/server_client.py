"""`ServerClient`: asks a server that speaks OpenAI's protocol, such as `llmcli serve`, for answers as they come.

A server is not trusted: lines are bounded, and a breach of the protocol is an error.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx2

from llmcli import __version__
from llmcli.differences import shown
from llmcli.engine.chat_events import CLOSING, OPENING
from llmcli.errors import LLMCliError, ServerError, UsageError
from llmcli.reading import parse_json
from llmcli.tool_calls import named_form

CONNECT_SECONDS = 10.0
MODEL_SECONDS = 30.0  # for requests that need not wait for their turn
_NOT_NOW = (408, 429)  # statuses below 500 that are not the request's fault
CALL_FORM = named_form("hermes")
_CALL_END = "}</tool_call>"
_MAX_BYTES = 16 * 1024**2  # of an answer, or of a line of a stream


class ServerClient:
    """See the module.

    Every method but `close` raises, naming the address: UsageError for a request that the server refuses;
    ServerError for all else.
    """

    def __init__(self, address: str, api_key: str | None):
        """`address` may end in /v1, and be HOST:PORT alone. Raises: UsageError for an invalid address or key"""
        if re.fullmatch(r"[\w.-]+:\d+(/.*)?", address, re.ASCII):
            address = f"http://{address}"
        try:
            url = httpx2.URL(address)
            url.raw_host.decode().encode("idna")  # as sockets do: an empty label is refused
        except (httpx2.InvalidURL, UnicodeError) as error:
            raise UsageError(
                f"--server is {address!r}, expected an address such as http://127.0.0.1:8080: {error}"
            ) from error
        if url.scheme not in ("http", "https") or not url.host:
            raise UsageError(f"--server is {address!r}, expected an address such as http://127.0.0.1:8080")
        self.address = address.rstrip("/").removesuffix("/v1")
        headers = {"User-Agent": f"llmcli/{__version__}"}
        if api_key is not None:
            if not api_key:
                raise UsageError("--api-key is empty; give the server's key, or leave it out")
            if not api_key.isascii() or not api_key.isprintable() or " " in api_key:
                raise UsageError("--api-key holds no usable key, expected visible ASCII characters without spaces")
            headers["Authorization"] = f"Bearer {api_key}"
        self._client = httpx2.Client(headers=headers)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def model(self) -> str:
        """The name of the first model that is served."""
        with self._asked("GET", "/v1/models", read_seconds=MODEL_SECONDS) as response:
            answer = self._json(self._content(response))
        try:
            name = answer["data"][0]["id"]
        except (LookupError, TypeError) as error:
            raise self._odd("its list of models has none") from error
        if not isinstance(name, str) or not name or not name.isprintable():
            raise self._odd(f"it names its model {shown(name)}")
        return name

    def pieces(self, body: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
        """The texts of an answer as they come, the last with the finish reason; close the iterator to drop the rest.

        What the server keeps apart comes as a model writes it: reasoning between tags, tool calls in the form
        `CALL_FORM`.
        """
        is_inside, end = False, ""  # of a call that has begun
        with self._asked("POST", "/v1/chat/completions", {**body, "stream": True}) as response:
            for line in self._lines(response):
                content = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:"):  # a comment, or nothing
                    continue
                if content == b"[DONE]":
                    return
                piece = self._json(content)
                if piece.get("error"):
                    raise ServerError(f"{self.address}: {_message(piece) or 'the answer failed'}")
                for reasoning, text, calls, reason in self._texts(piece):
                    said = ""
                    if reasoning:
                        said, is_inside = f"{'' if is_inside else OPENING}{reasoning}", True
                    if text or calls:
                        said, is_inside = f"{said}{CLOSING if is_inside else ''}{text}", False
                    for name, arguments in calls:
                        if name:  # it comes with a call's first piece alone
                            said += f'{end}<tool_call>{{"name": {json.dumps(name)}, "arguments": '
                            end = f"{{}}{_CALL_END}"
                        if arguments:
                            said, end = said + arguments, _CALL_END
                    yield said + (end if reason else ""), reason
            raise self._odd("the answer ended early")

    @contextmanager
    def _asked(
        self, method: str, path: str, body: Any = None, *, read_seconds: float | None = None
    ) -> Iterator[httpx2.Response]:
        """An answer with a good status, its body not read yet."""
        # An answer may wait as long for its turn as the server allows.
        timeout = httpx2.Timeout(read_seconds, connect=CONNECT_SECONDS)
        is_answering = False
        try:
            with self._client.stream(method, f"{self.address}{path}", json=body, timeout=timeout) as response:
                is_answering = True
                if response.status_code != 200:
                    raise self._refused(path, response.status_code, self._content(response))
                yield response
        except httpx2.TimeoutException as error:
            raise ServerError(f"{self.address} does not answer; try again, or check --server") from error
        except httpx2.HTTPError as error:
            if is_answering:
                raise ServerError(
                    f"{self.address} ended in the middle of its answer: {error}; try again once it runs"
                ) from error
            raise ServerError(
                f"{self.address} cannot be reached: {error}; start `llmcli serve` there, or check --server"
            ) from error

    def _content(self, response: httpx2.Response) -> bytes:
        content = b""
        for part in response.iter_bytes():
            content += part
            if len(content) > _MAX_BYTES:
                raise self._odd("its answer is too long")
        return content

    def _lines(self, response: httpx2.Response) -> Iterator[bytes]:
        rest = b""
        for part in response.iter_bytes():
            *lines, rest = (rest + part).split(b"\n")
            yield from lines
            if len(rest) > _MAX_BYTES:
                raise self._odd("a line of its answer is too long")

    def _json(self, content: bytes) -> dict[str, Any]:
        try:
            value = parse_json(content)
        except (ValueError, json.JSONDecodeError) as error:
            raise self._odd("it answers with something other than JSON") from error
        if not isinstance(value, dict):
            raise self._odd("it answers with something other than an object")
        return value

    def _texts(self, piece: Mapping[str, Any]) -> Iterator[tuple[str, str, list[tuple[str, str]], str | None]]:
        """Reasoning, text, the names and arguments of calls, and the finish reason."""
        choices = piece.get("choices", [])
        for choice in choices if isinstance(choices, list) else [choices]:
            delta = choice.get("delta", {}) if isinstance(choice, dict) else None
            if not isinstance(delta, dict):
                raise self._odd("a piece of its answer has no text")
            reasoning = delta.get("reasoning_content") or delta.get("reasoning")  # servers use either name
            text, reason = delta.get("content"), choice.get("finish_reason")
            if not all(isinstance(one, str | None) for one in (reasoning, text, reason)):
                raise self._odd("a piece of its answer has no text")
            yield reasoning or "", text or "", [self._call(call) for call in delta.get("tool_calls") or ()], reason

    def _call(self, call: Any) -> tuple[str, str]:
        function = call.get("function") if isinstance(call, dict) else None
        told = [function.get(key) or "" for key in ("name", "arguments")] if isinstance(function, dict) else []
        if not told or not all(isinstance(text, str) for text in told):
            raise self._odd("a tool call of its answer has no function")
        return told[0], told[1]

    def _refused(self, path: str, status: int, content: bytes) -> LLMCliError:
        try:
            message = _message(self._json(content))
        except ServerError:  # such as a proxy's page
            message = None
        remedy = ""
        if status == 401:
            remedy = "; give the server's key by --api-key or LLMCLI_API_KEY"
        elif status == 404 and path == "/v1/models":
            remedy = "; check the path of --server"
        kind = ServerError if status in _NOT_NOW or status >= 500 else UsageError
        return kind(f"{self.address}: {message or f'HTTP {status}'}{remedy}")

    def _odd(self, what: str) -> ServerError:
        return ServerError(f"{self.address}: {what}; is it a server of OpenAI's protocol?")


def _message(answer: Mapping[str, Any]) -> str | None:
    """Why a server refuses: in OpenAI's form, or under another known key; None if it does not say."""
    error = answer.get("error")
    messages = (error.get("message") if isinstance(error, dict) else error, answer.get("message"), answer.get("detail"))
    return next((message for message in messages if isinstance(message, str) and message), None)
