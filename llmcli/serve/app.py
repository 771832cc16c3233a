"""The ASGI application: its routes, the gate before them, and CORS if asked for."""

from __future__ import annotations

import secrets
import time
from base64 import b64encode
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from html import escape
from pathlib import Path
from string import Template
from typing import TypeVar

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from llmcli.engine.request import Request
from llmcli.serve.answers import Answer, ChatAnswer, CompletionAnswer, Echo
from llmcli.serve.bodies import ChatBody, CompletionBody, DetokenizeBody, TextsBody, TokenizeBody
from llmcli.serve.gate import Gate
from llmcli.serve.json_text import json_response, large_json_response
from llmcli.serve.refusal import Refusal
from llmcli.serve.service import Service, client_of, unless_gone
from llmcli.serve.texts import TextsResponse
from llmcli.tokenizer.base import StreamDecoder

# /v1/chat/completions and /v1/completions.

Kind = TypeVar("Kind", bound=TextsBody)


def texts_routes(service: Service) -> list[Route]:
    """The routes that generate."""

    async def chat(http: HttpRequest) -> TextsResponse:
        body = _with_seed(await service.read(ChatBody, http), service)
        _log(service, body.messages)
        with service.desk.waiting(body.n, "n"):
            async with service.limits.timed() as deadline:
                requests = [await service.encode(http, lambda: service.model.answer(body))]
                return await respond(http, body, requests, ChatAnswer, deadline)

    async def complete(http: HttpRequest) -> TextsResponse:
        body = _with_seed(await service.read(CompletionBody, http), service)
        _log(service, body.prompts)
        prompts = body.prompts
        with service.desk.waiting(body.n * len(prompts), "n" if len(prompts) == 1 else "prompt"):
            async with service.limits.timed() as deadline:
                encode = [partial(service.model.completion, body, prompt) for prompt in prompts]
                requests = [await service.encode(http, work) for work in encode]  # one by one: others get their turn
                echoes = await service.encode(http, lambda: _echoes(service, body, requests)) if body.echo else ()
                return await respond(http, body, requests, CompletionAnswer, deadline, echoes)

    async def respond(
        http: HttpRequest,
        body: TextsBody,
        requests: Sequence[Request],
        kind: type[Answer],
        deadline: float | None,
        echoes: Sequence[Echo] = (),
    ) -> TextsResponse:
        grammar = None
        if body.constraint is not None:
            grammar = await unless_gone(service.read_schema(client_of(http), body.constraint), http.receive)
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
    style, script, skeleton = _read("chat.css"), _read("chat.js"), _read("chat.html")
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
