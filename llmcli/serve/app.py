"""The ASGI application: its routes, the gate before them, and CORS if asked for."""

import asyncio
import hmac
import secrets
import time
from base64 import b64encode
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from html import escape
from pathlib import Path
from string import Template
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmcli.engine.request import Request
from llmcli.errors import LLMCliError
from llmcli.schema.constraint import Constraint
from llmcli.serve.answers import CLIENT_LEFT, Answer, ChatAnswer, CompletionAnswer, Echo, TextsResponse
from llmcli.serve.bodies import ChatBody, CompletionBody, DetokenizeBody, TextsBody, TokenizeBody
from llmcli.serve.refusal import Refusal, as_refusal, json_response, large_json_response, stopped
from llmcli.serve.responses import OWN_NAMES, ResponsesAnswer, ResponsesBody
from llmcli.serve.service import Metrics, Service, client_of, unless_gone
from llmcli.tokenizer.base import StreamDecoder

# /v1/chat/completions, /v1/responses and /v1/completions.

Kind = TypeVar("Kind", bound=TextsBody)


def texts_routes(service: Service) -> list[Route]:
    """The routes that generate."""

    async def chat(http: HttpRequest) -> TextsResponse:
        body = _with_seed(await service.read(ChatBody, http), service)
        return await converse(http, body, ChatAnswer)

    async def answer_in_items(http: HttpRequest) -> TextsResponse:
        body = _with_seed(await service.read(ResponsesBody, http), service)
        try:
            return await converse(http, body, partial(ResponsesAnswer, body=body))
        except Refusal as refusal:
            refusal.param = OWN_NAMES.get(refusal.param or "", refusal.param)
            raise

    async def converse(http: HttpRequest, body: ChatBody, kind: Callable[..., Answer]) -> TextsResponse:
        _log(service, body.messages)
        with service.desk.waiting(body.n, "n"):
            async with service.limits.timed() as deadline:
                asked = await service.encode(http, lambda: service.model.answer(body))
                kind = partial(kind, start=asked.start, offer=asked.offer)
                return await respond(http, body, [asked.request], asked.constraint, kind, deadline)

    async def complete(http: HttpRequest) -> TextsResponse:
        body = _with_seed(await service.read(CompletionBody, http), service)
        _log(service, body.prompts)
        prompts = body.prompts
        with service.desk.waiting(body.n * len(prompts), "n" if len(prompts) == 1 else "prompt"):
            async with service.limits.timed() as deadline:
                encode = [partial(service.model.completion, body, prompt) for prompt in prompts]
                requests = [await service.encode(http, work) for work in encode]  # one by one: others get their turn
                echoes = await service.encode(http, lambda: _echoes(service, body, requests)) if body.echo else ()
                return await respond(http, body, requests, body.constraint, CompletionAnswer, deadline, echoes)

    async def respond(
        http: HttpRequest,
        body: TextsBody,
        requests: Sequence[Request],
        constraint: Constraint | None,
        kind: Callable[..., Answer],
        deadline: float | None,
        echoes: Sequence[Echo] = (),
    ) -> TextsResponse:
        grammar = None
        if constraint is not None:
            grammar = await unless_gone(service.read_schema(client_of(http), constraint), http.receive)
        model = service.model
        requests = [replace(request, client=client_of(http)) for request in requests]
        answer = kind(
            model.names[0],
            requests,
            model.tokenizer,
            includes_usage=body.includes_usage,
            counts_in_pieces=body.counts_in_pieces,
            echoes=echoes,
        )
        return TextsResponse(service, requests, answer, body.stream, deadline, grammar)

    return [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/responses", answer_in_items, methods=["POST"]),
        Route("/v1/completions", complete, methods=["POST"]),
    ]


def _with_seed(body: Kind, service: Service) -> Kind:
    """The body with a seed for all its texts."""
    if body.seed is not None:
        return body
    seed = service.model.seed
    with_seed: Kind = body.model_copy(update={"seed": secrets.randbits(32) if seed is None else seed})
    return with_seed


def _echoes(service: Service, body: CompletionBody, requests: Sequence[Request]) -> list[Echo]:
    """The text to send before each prompt's texts: as given, or decoded from its ids."""
    echoes = []
    for prompt, request in zip(body.prompts, requests, strict=True):
        decoder = StreamDecoder(service.model.tokenizer, at_start=True)
        pieces = [decoder.push(token_id) for token_id in request.prompt_token_ids]
        echoes.append(Echo(prompt if isinstance(prompt, str) else "".join(pieces) + decoder.flush(), pieces))
    return echoes


def _log(service: Service, contents: object) -> None:
    if service.log_contents is not None:
        service.log_contents("prompt", contents)


# /tokenize and /detokenize, with vLLM's keys.


def tokens_routes(service: Service) -> list[Route]:
    """The routes about tokens."""
    tokenizer = service.model.tokenizer

    async def tokenize(http: HttpRequest) -> Response:
        body = await service.read(TokenizeBody, http)

        def encode() -> Response:
            token_ids = list(service.model.encode(body.prompt or body.messages or ""))
            pieces = {token_id: tokenizer.piece(token_id) for token_id in set(token_ids)}
            answer = {
                "count": len(token_ids),
                "max_model_len": service.model.context,
                "tokens": token_ids,
                "token_strs": [pieces[token_id] for token_id in token_ids],
            }
            return large_json_response(answer)

        async with service.limits.timed():
            return await service.encode(http, encode)

    async def detokenize(http: HttpRequest) -> Response:
        body = await service.read(DetokenizeBody, http)

        def decode() -> Response:
            if (largest := max(body.tokens, default=0)) >= tokenizer.vocab_size:
                message = f"tokens holds {largest}, expected 0 to {tokenizer.vocab_size - 1}"
                raise Refusal(400, message, param="tokens")
            decoder = StreamDecoder(tokenizer, at_start=True)
            return json_response({"prompt": "".join(map(decoder.push, body.tokens)) + decoder.flush()})

        async with service.limits.timed():
            return await service.encode(http, decode)

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]


# The chat page at `/`: one answer that loads nothing; its content security policy allows requests to this server only.


def page_routes(service: Service) -> list[Route]:
    """The route of the page."""
    content, policy = render_page(service.model.names[0])
    headers = {
        "content-security-policy": policy,
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cache-control": "no-store",
    }

    async def page(http: HttpRequest) -> Response:
        return HTMLResponse(content, headers=headers)

    return [Route("/", page)]


def render_page(model: str) -> tuple[str, str]:
    """The page, and its content security policy."""
    style, script, skeleton = _read("chat.css"), _read("markdown.js") + _read("chat.js"), _read("chat.html")
    policy = (
        f"default-src 'none'; connect-src 'self'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Template(skeleton).substitute(model=escape(model), style=style, script=script), policy


def _read(name: str) -> str:
    return (Path(__file__).parent / "page" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


# Facts about the server: /v1/models, /health, /metrics, and the refusal of /v1/embeddings.


def about_routes(service: Service) -> list[Route]:
    """The routes about the server."""
    created = int(time.time())

    async def models(http: HttpRequest) -> Response:
        return json_response({"object": "list", "data": [_model(name) for name in service.model.names]})

    async def model(http: HttpRequest) -> Response:
        name = http.path_params["name"]
        if name not in service.model.names:
            expected = " or ".join(map(repr, service.model.names))
            message = f"the model {name[:200]!r} is not served here, expected {expected}"
            raise Refusal(404, message, param="model", code="model_not_found")
        return json_response(_model(name))

    def _model(name: str) -> dict[str, object]:
        facts = {"owned_by": "llmcli", "max_model_len": service.model.context}
        return {"id": name, "object": "model", "created": created, **facts}

    async def health(http: HttpRequest) -> Response:
        fault = service.desk.engine.fault
        if fault is None:
            return json_response({"status": "ok"})
        return json_response({"status": "failed", "message": f"{fault}; restart the server"}, 503)

    async def metrics(http: HttpRequest) -> Response:
        state = await service.desk.engine.state()
        return PlainTextResponse(
            service.metrics.text(state, service.desk.num_texts), media_type="text/plain; version=0.0.4"
        )

    async def embeddings(http: HttpRequest) -> Response:
        raise Refusal(404, "this server has no embeddings; it generates text only", code="not_supported")

    return [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
    ]


def build_app(
    service: Service,
    *,
    api_key: str | None,
    hosts: Collection[str],
    origins: Sequence[str],
    log: Callable[[str], None],
) -> ASGIApp:
    """The application. Pages of `origins` may use it from a browser; `api_key`, `hosts` and `log` as for `Gate`."""
    routes = [*texts_routes(service), *tokens_routes(service), *about_routes(service), *page_routes(service)]
    router = Router(routes, redirect_slashes=False)
    paths = frozenset(route.path for route in routes)
    gate = Gate(
        router,
        api_key,
        hosts,
        service.metrics,
        paths,
        log,
        logs_contents=service.log_contents is not None,
        on_end=service.bodies.give_back,
    )
    if not origins:
        return gate
    return CORSMiddleware(gate, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])


# `Gate`: decides who may come in, counts and logs each request, and puts every error into OpenAI's form.

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
