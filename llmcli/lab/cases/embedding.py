"""The vectors of tokens, out of a table."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from llmcli.kernels.device import Device
from llmcli.kernels.elementwise import embedding, embedding_cost
from llmcli.lab.matrices import STORAGE, storage_name, to_storage
from llmcli.lab.problem import ENGINE, Arrays, Expected, KernelCases, Output, Problem, stored_values

_VOCAB_SIZE = 61


def case(num_tokens: int, hidden_size: int, dtype: Any, vocab_size: int = _VOCAB_SIZE) -> Problem:
    """Ids of the whole table, its ends included."""
    generator = np.random.default_rng(hidden_size)
    table = to_storage(generator.normal(size=(vocab_size, hidden_size)), dtype)
    ids = generator.integers(0, vocab_size, num_tokens).astype(np.int32)
    ids[0], ids[-1] = vocab_size - 1, 0
    return _problem(table, {"token_ids": ids}, lambda: stored_values(table)[ids], storage_name(dtype))


def unknown_ids_case(hidden_size: int) -> Problem:
    """Ids outside the table give NaN, and read nothing."""
    table = np.arange(3 * hidden_size, dtype=np.float32).reshape(3, hidden_size)
    ids = np.array([2, -1, 3, 2**31 - 1, -(2**31), 0], np.int32)

    def values() -> np.ndarray:
        expected = np.full((len(ids), hidden_size), np.nan)
        expected[[0, 5]] = table[[2, 0]]
        return expected

    return _problem(table, {"token_ids": ids}, values, "unknown ids")


def rows_case(hidden_size: int) -> Problem:
    """Ids of rows; row -1 gives zeros."""
    table = np.arange(5 * hidden_size, dtype=np.float32).reshape(5, hidden_size) + 1
    inputs = {"token_ids": np.array([3, 99, 1, 4], np.int32), "rows": np.array([2, -1, 0, 3, 2, -1], np.int32)}

    def values() -> np.ndarray:
        expected = np.zeros((6, hidden_size))
        expected[[0, 2, 3, 4]] = table[[1, 3, 4, 1]]
        return expected

    return _problem(table, inputs, values, "rows")


def _problem(table: np.ndarray, inputs: dict[str, np.ndarray], values: Any, label: str) -> Problem:
    hidden_size = table.shape[1]
    num_tokens = len(inputs.get("rows", inputs["token_ids"]))
    return Problem(
        "embedding",
        {"num_tokens": num_tokens, "hidden_size": hidden_size},
        inputs={"table": table, **inputs},
        outputs={"out": Output((num_tokens, hidden_size))},
        reference=lambda: {"out": Expected(values(), 0.0)},
        cost=embedding_cost(num_tokens=num_tokens, hidden_size=hidden_size, itemsize=table.dtype.itemsize),
        solvers={ENGINE: _solve},
        label=label,
    )


def _checks() -> Iterator[Problem]:
    for hidden_size in (1, 7, 172, 1030, 4096, 9001):
        for dtype in STORAGE:
            yield case(5, hidden_size, dtype)
    for hidden_size in (7, 64):
        yield unknown_ids_case(hidden_size)
        yield rows_case(hidden_size)


def _solve(device: Device, arrays: Arrays) -> None:
    table, token_ids, rows = arrays["table"], arrays["token_ids"], arrays.get("rows")
    embedding(device, table=table, token_ids=token_ids, rows=rows, out=arrays["out"])


CASES = KernelCases("embedding", _checks, partial(case, 1, 4096, np.float16, 4000))
