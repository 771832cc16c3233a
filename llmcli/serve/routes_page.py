"""The chat page at `/`: one answer, which loads nothing and, by its content security policy, asks this server only."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from html import escape
from pathlib import Path
from string import Template

from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from llmcli.serve.service import Service


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
