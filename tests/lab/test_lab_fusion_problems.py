"""GELU after a bias, masked softmax: references against torch; float32 stays within the bounds, mistakes do not."""

import numpy as np
import pytest
import torch

from llmcli.errors import UsageError
from llmcli.lab.catalogue import make_problem
from llmcli.lab.problem import Problem, find_mismatch

ROWS = {"num_rows": 3, "num_columns": 1003}
HEADS = {"num_heads": 4, "num_queries": 5, "num_keys": 300}


def tensors(problem: Problem, *names: str) -> list[torch.Tensor]:
    return [torch.from_numpy(problem.inputs[name]).double() for name in names]


def is_right(problem: Problem, out: torch.Tensor) -> bool:
    return find_mismatch(problem, {"out": out.float().numpy()}) is None


def test_gelu_is_torch_s() -> None:
    problem = make_problem("bias_gelu", ROWS)
    x, bias = tensors(problem, "x", "bias")
    expected = torch.nn.functional.gelu(x + bias, approximate="tanh")
    np.testing.assert_allclose(problem.expected["out"].values, expected.numpy(), rtol=1e-9, atol=1e-12)
    assert is_right(problem, torch.nn.functional.gelu((x + bias).float(), approximate="tanh"))
    assert not is_right(problem, torch.nn.functional.gelu(x + bias))  # the exact form
    assert not is_right(problem, torch.nn.functional.gelu(x, approximate="tanh"))


def masked(problem: Problem, offset: int = 0) -> torch.Tensor:
    scores, slopes = tensors(problem, "scores", "slopes")
    _, num_queries, num_keys = scores.shape
    seen = torch.ones(num_queries, num_keys).tril(num_keys - num_queries + offset).bool()
    biased = scores + slopes[:, None, None] * torch.arange(num_keys)
    return biased.masked_fill(~seen, -torch.inf)


def test_the_masked_softmax_is_torch_s() -> None:
    problem = make_problem("masked_softmax", HEADS)
    expected = masked(problem).softmax(-1)
    np.testing.assert_allclose(problem.expected["out"].values, expected.numpy(), rtol=1e-9, atol=1e-300)
    hidden = problem.inputs["mask"] == 1
    assert torch.equal(masked(problem)[0] == -torch.inf, torch.from_numpy(hidden))
    assert is_right(problem, masked(problem).float().softmax(-1))
    assert not is_right(problem, masked(problem, offset=-1).softmax(-1))
    assert not is_right(problem, masked(problem, offset=1).softmax(-1))


def test_more_queries_than_keys_are_refused() -> None:
    with pytest.raises(UsageError, match="5 queries"):
        make_problem("masked_softmax", {"num_heads": 1, "num_queries": 5, "num_keys": 4})
