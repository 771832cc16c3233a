"""References of problems against torch in float64, and the message about a wrong element."""

import numpy as np
import pytest
import torch

from llmcli.errors import UsageError
from llmcli.lab.catalogue import PROBLEMS, make_problem
from llmcli.lab.problem import find_mismatch


def test_rms_norm_is_torch_s() -> None:
    problem = make_problem("rms_norm", {"num_rows": 3, "num_columns": 100})
    x, weight = (torch.from_numpy(problem.inputs[name]).double() for name in ("x", "weight"))
    expected = torch.nn.functional.rms_norm(x, (100,), weight, eps=float(np.float32(1e-5)))
    np.testing.assert_allclose(problem.expected["out"].values, expected.numpy(), rtol=1e-12)


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_catalogue_has_the_names_of_its_kinds(name: str) -> None:
    assert PROBLEMS[name].name == name
    assert PROBLEMS[name].summary


def test_a_wrong_element_is_named() -> None:
    problem = make_problem("rms_norm", {"num_rows": 2, "num_columns": 5})
    out = problem.expected["out"].values.astype(np.float32)
    out[1, 3] += 0.5
    out[0, 2] += 1e-3
    mismatch = find_mismatch(problem, {"out": out})
    assert mismatch is not None
    assert (mismatch.index, mismatch.count, mismatch.size) == ((1, 3), 2, 10)
    assert str(mismatch).startswith("out[1, 3] is ")
    assert "expected" in str(mismatch)


def test_what_was_not_written_is_wrong() -> None:
    problem = make_problem("rms_norm", {"num_rows": 1, "num_columns": 3})
    out = problem.expected["out"].values.astype(np.float32)
    out[0, 1] = np.nan
    mismatch = find_mismatch(problem, {"out": out})
    assert mismatch is not None
    assert mismatch.index == (0, 1)


@pytest.mark.parametrize(("name", "sizes"), [("rms_nrm", {"n": 1}), ("rms_norm", {"n": 1})])
def test_unknown_names_and_sizes_are_refused(name: str, sizes: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        make_problem(name, sizes)
