"""Sizes of a launch as CUDA programs write them: whole numbers, names, + - * / %, parentheses. Nothing else is run."""

import ast
import operator
from collections.abc import Mapping

from llmcli.errors import UsageError

_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,  # as between C's whole numbers
    ast.Mod: operator.mod,
}
_MAX_LENGTH = 200


def evaluate(text: str, names: Mapping[str, int]) -> int:
    """The value of an expression over these names.

    Raises: UsageError
    """
    try:
        if len(text) > _MAX_LENGTH:
            raise ValueError(f"longer than {_MAX_LENGTH} characters")
        return _value(ast.parse(text.strip(), mode="eval").body, names)
    except (SyntaxError, ValueError, ZeroDivisionError) as error:
        problem = error.msg if isinstance(error, SyntaxError) else error
        raise UsageError(f"{text!r} cannot be worked out: {problem}; sizes here are {', '.join(names)}") from error


def _value(node: ast.expr, names: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return int(_OPERATIONS[type(node.op)](_value(node.left, names), _value(node.right, names)))
    raise ValueError(f"{ast.unparse(node)!r} is neither a number, a known size nor + - * / %")
