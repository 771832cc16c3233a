"""`ServerClient`: asks a server that speaks OpenAI's protocol, such as `llmcli serve`, for answers as they come.

What a server sends is a stranger's: lines are bounded, and what is not as the protocol has it is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx2

from llmcli import __version__
from llmcli.errors import LLMCliError, UsageError
from llmcli.reading import parse_json

CONNECT_SECONDS = 10.0
_MAX_BYTES = 16 * 1024**2  # of an answer that is no stream, and of a line of one that is


class ServerClient:
    """See the module. Raises: LLMCliError, naming the address, from every method but `close`."""

    def __init__(self, address: str, api_key: str | None):
        """`address` may end in /v1. Raises: UsageError for what is no address"""
        try:
            url = httpx2.URL(address)
        except httpx2.InvalidURL as error:
            raise UsageError(
                f"--server is {address!r}, expected an address such as http://127.0.0.1:8080: {error}"
            ) from error
        if url.scheme not in ("http", "https") or not url.host:
            raise UsageError(f"--server is {address!r}, expected an address such as http://127.0.0.1:8080")
        self.address = address.rstrip("/").removesuffix("/v1")
        headers = {"User-Agent": f"llmcli/{__version__}"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        # An answer may wait for its turn as long as the server lets it.
        self._client = httpx2.Client(headers=headers, timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def model(self) -> str:
        """The name of the first model that is served."""
        with self._asked("GET", "/v1/models") as response:
            answer = self._json(self._content(response))
        try:
            return str(answer["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise self._odd("its list of models has none") from error

    def pieces(self, body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """The pieces of an answer as they come; closing the iterator drops the rest of it."""
        with self._asked("POST", "/v1/chat/completions", {**body, "stream": True}) as response:
            for line in self._lines(response):
                content = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:"):  # a comment, or nothing
                    continue
                if content == b"[DONE]":
                    return
                piece = self._json(content)
                if "error" in piece:
                    raise self._refused(piece)
                yield piece
            raise self._odd("the answer ended early")

    @contextmanager
    def _asked(self, method: str, path: str, body: Any = None) -> Iterator[httpx2.Response]:
        """An answer of which the status is right and nothing has been read."""
        try:
            with self._client.stream(method, f"{self.address}{path}", json=body) as response:
                if response.status_code != 200:
                    raise self._refused(self._json(self._content(response)))
                yield response
        except httpx2.TimeoutException as error:
            raise LLMCliError(f"{self.address} does not answer") from error
        except httpx2.HTTPError as error:
            raise LLMCliError(f"{self.address} cannot be reached: {error}") from error

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

    def _refused(self, answer: Mapping[str, Any]) -> LLMCliError:
        error = answer.get("error")
        message = error.get("message") if isinstance(error, dict) else error
        return LLMCliError(f"{self.address}: {message}")

    def _odd(self, what: str) -> LLMCliError:
        return LLMCliError(f"{self.address}: {what}; is it a server of OpenAI's protocol?")
