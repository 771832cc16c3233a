"""/tokenize and /detokenize, with vLLM's keys."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from llmcli.serve.bodies import DetokenizeBody, TokenizeBody
from llmcli.serve.json_text import json_response, large_json_response
from llmcli.serve.refusal import Refusal
from llmcli.serve.service import Service
from llmcli.tokenizer.base import StreamDecoder


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
