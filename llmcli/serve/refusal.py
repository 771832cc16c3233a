"""`Refusal`: a request that is not served, with its HTTP status, and every error in OpenAI's form."""

import io
import json
from functools import partial
from typing import Any

from starlette.responses import JSONResponse, Response

from llmcli.errors import LLMCliError, TokenizerError, UsageError

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """Why a request is not served. `param` is the key that is wrong; `code` is a word for programs."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the keyword arguments too."""
        return partial(Refusal, param=self.param, code=self.code), (self.status, self.message)

    def as_json(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, usual)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def stopped() -> Refusal:
    """The refusal of what was under way when the server ended."""
    return Refusal(503, "the server was stopped before the answer was whole; try again later", code="server_stopped")


def as_refusal(error: Exception) -> Refusal:
    """The refusal for an error: the client's fault is a 400, the device's a 500, and anything else a bug."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, UsageError | TokenizerError):
        return Refusal(400, str(error))
    if isinstance(error, LLMCliError):
        return Refusal(500, str(error))
    return Refusal(500, f"internal error, please report it: {type(error).__name__}: {error}")


# JSON as the server writes it: on one line, in UTF-8.

# json.dumps would make one for each value.
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def to_json(value: object) -> bytes:
    """JSON on one line."""
    return _JSON.encode(value).encode()


def json_response(value: object, status: int = 200) -> Response:
    """A response of JSON."""
    return Response(to_json(value), status, media_type=JSONResponse.media_type)


def large_json_response(value: object) -> Response:
    """The same, for a thread: lets other threads run meanwhile, which C's encoder does not."""
    text = io.StringIO()
    for piece in _JSON.iterencode(value):  # millions of pieces, which a list would keep
        text.write(piece)
    return Response(text.getvalue(), media_type=JSONResponse.media_type)
