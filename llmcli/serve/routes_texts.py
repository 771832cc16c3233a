"""/v1/chat/completions and /v1/completions."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from llmcli.engine.request import Request
from llmcli.serve.answers import Answer, ChatAnswer, CompletionAnswer, Echo
from llmcli.serve.bodies import ChatBody, CompletionBody, TextsBody
from llmcli.serve.service import Service, client_of, unless_gone
from llmcli.serve.texts import TextsResponse
from llmcli.tokenizer.base import StreamDecoder

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
                requests = [await service.encode(http, work) for work in encode]  # one by one: others have their turn
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
        if body.held_to is not None:
            grammar = await unless_gone(service.read_schema(client_of(http), body.held_to), http.receive)
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
    """What is told of each prompt: the text as it was given, or that of its ids."""
    echoes = []
    for prompt, request in zip(body.prompts, requests, strict=True):
        decoder = StreamDecoder(service.model.tokenizer, at_start=True)
        pieces = [decoder.push(token_id) for token_id in request.prompt_token_ids]
        echoes.append(Echo(prompt if isinstance(prompt, str) else "".join(pieces) + decoder.flush(), pieces))
    return echoes


def _log(service: Service, contents: object) -> None:
    if service.log_contents is not None:
        service.log_contents("prompt", contents)
