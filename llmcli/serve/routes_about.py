"""What the server says of itself: /v1/models, /health, /metrics, and the refusal of /v1/embeddings."""

from __future__ import annotations

import time

from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from llmcli.serve.json_text import json_response
from llmcli.serve.refusal import Refusal
from llmcli.serve.service import Service


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
