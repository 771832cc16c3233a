"""Rotary embedding: each form against torch, in the code of its models."""

import numpy as np
import pytest
import torch

from llmcli.lab.catalogue import make_problem
from llmcli.lab.notes import Notes, phantoms_of
from llmcli.lab.problem import Problem, find_mismatch

SIZES = {"num_tokens": 5, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
FORMS = ("half", "adjacent", "two_parts")


def heads_of(values: np.ndarray) -> torch.Tensor:
    """The heads that are rotated. Shapes: values [5, 160]; result [5, 8, 16]"""
    return torch.from_numpy(values[:, :128].reshape(5, 8, 16)).double()


def angles_of(problem: Problem, part: int, size: int) -> torch.Tensor:
    """Shapes: result float64 [5, 1, size / 2]"""
    positions = torch.from_numpy(problem.inputs["positions"].reshape(-1, 5)[part])
    inverse = 1.0 / 10_000 ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size)
    assert np.allclose(inverse, problem.inputs["frequencies"], rtol=2e-7, atol=0)
    return (positions.float()[:, None] * torch.from_numpy(problem.inputs["frequencies"])).double()[:, None]


def rotate_half(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Hugging Face's."""
    cos, sin = (torch.cat((f(angles), f(angles)), dim=-1) for f in (torch.cos, torch.sin))
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def rotated(problem: Problem, form: str) -> torch.Tensor:
    x = heads_of(problem.inputs["before"])
    if form == "half":
        return rotate_half(x, angles_of(problem, 0, 16))
    if form == "adjacent":  # a pair is a complex number
        numbers = torch.view_as_complex(x.reshape(5, 8, 8, 2).contiguous())
        angles = angles_of(problem, 0, 16)
        return torch.view_as_real(numbers * torch.polar(torch.ones_like(angles), angles)).flatten(2)
    halves = x.chunk(2, dim=-1)
    return torch.cat([rotate_half(half, angles_of(problem, part, 8)) for part, half in enumerate(halves)], dim=-1)


@pytest.mark.parametrize("form", FORMS)
def test_forms_are_torch_s(form: str) -> None:
    problem = make_problem(f"rotary_{form}", SIZES)
    values = problem.expected["data"].values
    np.testing.assert_allclose(heads_of(values).numpy(), rotated(problem, form).numpy(), rtol=1e-12, atol=1e-12)
    assert np.array_equal(values[:, 128:], problem.inputs["before"][:, 128:]), "values are not rotated"


@pytest.mark.parametrize("form", FORMS)
def test_another_form_another_direction_and_rotated_values_are_found(form: str) -> None:
    problem = make_problem(f"rotary_{form}", SIZES)
    right = problem.expected["data"].values.astype(np.float32)
    assert find_mismatch(problem, {"data": right}) is None
    assert find_mismatch(problem, {"data": problem.inputs["before"]}) is not None
    for other in set(FORMS) - {form}:
        assert (
            find_mismatch(problem, {"data": make_problem(f"rotary_{other}", SIZES).expected["data"].values}) is not None
        )
    touched = right.copy()
    touched[0, 128] = np.nextafter(touched[0, 128], np.float32(9))
    assert find_mismatch(problem, {"data": touched}) is not None


@pytest.mark.parametrize("form", FORMS)
def test_tables_hold_the_angles_of_a_position(form: str) -> None:
    inputs = make_problem(f"rotary_{form}", SIZES).inputs
    frequencies = inputs["frequencies"]
    for position in (0, 1, 4095):
        angles = (np.float32(position) * frequencies).astype(np.float64)
        assert np.array_equal(inputs["cosines"][position], np.cos(angles).astype(np.float32))
        assert np.array_equal(inputs["sines"][position], np.sin(angles).astype(np.float32))
    assert np.array_equal(inputs["cos_sin"], np.stack((inputs["cosines"], inputs["sines"]), axis=-1))


def test_the_engine_has_the_form_of_llama_alone() -> None:
    problem, notes = make_problem("rotary_half", SIZES), Notes()
    problem.solvers["llmcli"](notes, phantoms_of(problem))  # type: ignore[arg-type]
    assert [launch.stem for launch in notes.launches] == ["rotary"]
    assert not any(make_problem(f"rotary_{form}", SIZES).solvers for form in ("adjacent", "two_parts"))
