"""The program of the child process that renders chat templates: jinja2's sandbox.

A template comes from a model folder, so it is a stranger's program. It sees JSON values and no files; its memory and
output are bounded here, its time by the parent. Only the child imports this module, because jinja2 takes 0.1 s to
import.
"""

import datetime
import functools
import json
import traceback
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from llmcli.tokenizer.sandbox import printable, serve

MEMORY_LIMIT_MB = 256
OUTPUT_LIMIT_MB = 4


def main() -> None:
    """Answer `{"source": ..., "variables": {...}}` with the text; without variables, with the names it looks up."""
    serve(lambda request: _answer(**request), _describe, MEMORY_LIMIT_MB)


def _answer(source: str, variables: dict[str, Any] | None = None) -> str | list[str]:
    return _names(source) if variables is None else _render(source, variables)


def _names(source: str) -> list[str]:
    environment = _compile(source).environment
    return sorted(jinja2.meta.find_undeclared_variables(environment.parse(source)))  # without the globals


def _render(source: str, variables: dict[str, Any]) -> str:
    parts: list[str] = []
    num_bytes = 0
    for part in _compile(source).generate(variables):
        num_bytes += len(part.encode(errors="surrogatepass"))
        if num_bytes > OUTPUT_LIMIT_MB * 2**20:
            raise jinja2.TemplateError(f"it writes more than {OUTPUT_LIMIT_MB} MB")
        parts.append(part)
    return "".join(parts)


def _describe(error: BaseException) -> str:
    """The error and the line of the template. Python's operators and methods may raise anything."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        reason, lines = error.message, [error.lineno]
    else:
        # jinja2 gives the frames of a template this file name.
        frames = traceback.walk_tb(error.__traceback__)
        lines = [line for frame, line in frames if frame.f_code.co_filename == "<template>"]
        reason = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
    return printable(str(reason)) + (f" (line {lines[-1]})" if lines else "")


@functools.lru_cache(maxsize=1)
def _compile(source: str) -> jinja2.Template:
    """The template in an environment like that of transformers, so that both render the same text.

    Raises: TemplateSyntaxError.
    Source: transformers 5.23, `_cached_compile_jinja_template` in utils/chat_template_utils.py.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda format: datetime.datetime.now().strftime(format),
        dict=_TemplateDict(),
        namespace=_TemplateNamespace,
    )
    return environment.from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter of this name escapes the characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what a model is trained on; here it only renders its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _TemplateDict:
    """`dict` for templates: its two uses, without access to the class itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(jinja2.utils.Namespace):
    """`namespace` for templates, without names that begin with an underscore."""

    # No named parameter, so that `namespace(self=1)` works.
    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}, which begins with an underscore")
