"""The packed form, against the functions of the compressed-tensors package."""

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from foreign_models import AWQ_ORDER, pack
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from llmcli.quantization.rounding import (
    Array,
    pack_rows,
    pack_zero_points,
    reorder_rows,
    rows_of_awq,
    rows_of_columns,
    unpack_rows,
    unpack_zero_points,
)
from llmcli.quantization.schemes import WeightScheme, packed_size

shapes = st.tuples(st.integers(1, 9), st.integers(1, 70))


def signed(codes: Array, num_bits: int) -> torch.Tensor:
    return torch.from_numpy((codes.astype(np.int16) - (1 << (num_bits - 1))).astype(np.int8))


@st.composite
def codes_of(draw: st.DrawFn, num_bits: int) -> Array:
    elements = st.integers(0, 2**num_bits - 1)
    return draw(hnp.arrays(np.uint8, draw(shapes), elements=elements))


@pytest.mark.parametrize("num_bits", [4, 8])
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_codes_are_packed_as_compressed_tensors_packs(num_bits: int, data: st.DataObject) -> None:
    codes = data.draw(codes_of(num_bits))
    packed = pack_rows(codes, num_bits)
    theirs = pack_to_int32(signed(codes, num_bits), num_bits)
    assert packed.dtype == np.int32
    assert packed.shape[1] == packed_size(codes.shape[1], num_bits)
    np.testing.assert_array_equal(packed, theirs.numpy())
    np.testing.assert_array_equal(unpack_rows(packed, num_bits, codes.shape[1]), codes)
    np.testing.assert_array_equal(
        unpack_from_int32(torch.from_numpy(packed), num_bits, torch.Size(codes.shape)), signed(codes, num_bits)
    )


@pytest.mark.parametrize("num_bits", [4, 8])
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_zero_points_are_packed_as_compressed_tensors_packs(num_bits: int, data: st.DataObject) -> None:
    zero_points = data.draw(codes_of(num_bits))
    packed = pack_zero_points(zero_points, num_bits)
    theirs = pack_to_int32(signed(zero_points, num_bits), num_bits, packed_dim=0)
    assert packed.flags.c_contiguous
    np.testing.assert_array_equal(packed, theirs.numpy())
    np.testing.assert_array_equal(unpack_zero_points(packed, num_bits, len(zero_points)), zero_points)


def test_layout_by_hand() -> None:
    assert pack_rows(np.array([[0x01, 0x82, 0xFF]], np.uint8), 8).tobytes() == b"\x01\x82\xff\x00"
    assert pack_rows(np.array([[1, 2, 3, 4, 5, 6, 7, 8, 9]], np.uint8), 4).tobytes() == bytes.fromhex(
        "2143658709000000"
    )


def test_shapes_of_a_scheme() -> None:
    scheme = WeightScheme(4, 32, is_symmetric=False)
    assert scheme.packed_shape((10, 36)) == (10, 5)
    assert scheme.scale_shape((10, 64)) == (10, 2)
    assert scheme.zero_point_shape((10, 64)) == (2, 2)
    assert WeightScheme(8, None).scale_shape((10, 36)) == (10, 1)
    assert WeightScheme(8, 32).num_groups(36) == 2
    assert [WeightScheme(8, 32).divides(size) for size in (32, 36)] == [True, False]
    assert WeightScheme(8, None).divides(36)


def test_ranges_of_a_scheme() -> None:
    assert WeightScheme(8, 128).code_range == (1, 255)
    assert WeightScheme(4, 128).code_range == (0, 15)
    assert WeightScheme(4, 128, is_symmetric=False).code_range == (0, 15)
    assert WeightScheme(8, 128, is_symmetric=False).code_range == (0, 255)
    assert str(WeightScheme(4, 128, is_symmetric=False)) == "int4, groups of 128, asymmetric"
    assert str(WeightScheme(8, None)) == "int8, one scale a row"


@pytest.mark.parametrize(("inputs", "outputs"), [(250, 8), (256, 48), (1003, 24)])
def test_what_others_pack_becomes_rows(inputs: int, outputs: int) -> None:
    """Blocks that are not full, and words that are not."""
    generator = np.random.default_rng(inputs)
    codes, order = generator.integers(0, 16, (outputs, inputs)), generator.permutation(inputs)
    rows = pack(codes, 4).numpy()
    assert np.array_equal(rows_of_awq(pack(codes.T, 4, AWQ_ORDER).numpy()), rows)
    assert np.array_equal(rows_of_columns(np.ascontiguousarray(rows.T)), rows)
    assert np.array_equal(reorder_rows(rows, 4, order), pack(codes[:, order], 4).numpy())
