"""JSON as the server writes it: on one line, in UTF-8."""

from __future__ import annotations

import io
import json

from starlette.responses import JSONResponse, Response

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
