"""The ASGI application: routes behind the gate, and CORS where it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Router
from starlette.types import ASGIApp

from llmcli.serve.gate import Gate
from llmcli.serve.routes_about import about_routes
from llmcli.serve.routes_page import page_routes
from llmcli.serve.routes_texts import texts_routes
from llmcli.serve.routes_tokens import tokens_routes
from llmcli.serve.service import Service


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
