"""`Gate`: decides who may come in, counts and logs each request, and puts every error into OpenAI's form."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmcli.errors import LLMCliError
from llmcli.serve.json_text import json_response
from llmcli.serve.refusal import Refusal, as_refusal, stopped
from llmcli.serve.service import Metrics
from llmcli.serve.texts import CLIENT_LEFT

# A page of another site may send a browser here under its own host name: without a key only these names are ours.
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
_BODY_UNREAD = frozenset({401, 403, 404, 405, 408, 413, 415})
OPEN_PATHS = frozenset({"/", "/health"})


@dataclass(frozen=True)
class Gate:
    """ASGI middleware around the routes. Without `api_key`, only requests to one of `hosts` come in; empty allows any.

    `paths` are counted by name; `log` gets one line a request, without the contents of the body except the name of a
    wrong key, unless `logs_contents`.
    """

    app: ASGIApp
    api_key: str | None
    hosts: Collection[str]
    metrics: Metrics
    paths: Collection[str]
    log: Callable[[str], None]
    logs_contents: bool = False
    on_end: Callable[[Scope], None] = lambda scope: None  # called once a request has its answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, as an ASGI application."""
        if scope["type"] != "http":
            return
        state: dict[str, Any] = scope.setdefault("state", {})
        scope["app"] = self.app  # so that the router raises what it cannot serve
        start_time, status = time.perf_counter(), CLIENT_LEFT

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._check(scope)
            await self.app(scope, receive, note_status)
        except ClientDisconnect:
            state["status"] = CLIENT_LEFT
        except (Exception, asyncio.CancelledError) as error:
            refusal = _refusal(error, scope)
            state["note"] = self._note(error, refusal)
            if status != CLIENT_LEFT:
                raise  # the answer has begun: only closing the connection shows that it is incomplete
            response = json_response(refusal.as_json(), refusal.status)
            if refusal.status in _BODY_UNREAD:
                response.headers["connection"] = "close"  # otherwise the rest of an endless body would be read
            await response(scope, receive, note_status)
            del refusal  # if it is the error: else traceback and this frame would be a reference cycle
        finally:
            self.on_end(scope)
            status = state.get("status", status)
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.requests[path, status] += 1
            seconds = time.perf_counter() - start_time
            note = f", {state['note']}" if state.get("note") else ""
            raw_path = scope["raw_path"][:200].decode("ascii", "replace")  # as sent: it cannot forge a line
            self.log(f"{scope['method']} {raw_path} {status} {seconds:.2f} s{note}")

    def _note(self, error: BaseException, refusal: Refusal) -> str:
        """The log's text for a refusal; messages about a body repeat what is in it, and those of our bugs may."""
        is_ours = isinstance(error, Refusal | HTTPException | LLMCliError | asyncio.CancelledError)
        if self.logs_contents or (is_ours and refusal.status != 400 and refusal.param is None):
            return refusal.message
        if not is_ours:
            return f"internal error, {type(error).__name__}"
        names = {"param": refusal.param, "code": refusal.code}
        return ", ".join(f"{what} {name}" for what, name in names.items() if name is not None)

    def _check(self, scope: Scope) -> None:
        """Check what the parser found, never a URL that is put together again.

        Raises: Refusal for a request that may not come in
        """
        headers = Headers(scope=scope)
        if len(headers.getlist("host")) > 1:
            raise Refusal(400, "the request names more than one host")
        if self.api_key is None:
            host = headers.get("host", "")
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if self.hosts and name.lower() not in self.hosts:
                raise Refusal(403, f"the host {host[:200]!r} is not served; start the server with --api-key for others")
            return
        if scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return
        kind, _, key = headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(key.strip().encode(), self.api_key.encode())
        if kind.lower() != "bearer" or not is_right:
            raise Refusal(401, "the API key is missing or wrong", code="invalid_api_key")


def _refusal(error: Exception | asyncio.CancelledError, scope: Scope) -> Refusal:
    if isinstance(error, asyncio.CancelledError):
        return stopped()
    if isinstance(error, HTTPException):  # of the router
        path = scope["path"][:200]
        what = {404: f"there is nothing at {path!r}", 405: f"{path!r} does not take {scope['method']}"}
        return Refusal(error.status_code, what.get(error.status_code, error.detail))
    return as_refusal(error)
