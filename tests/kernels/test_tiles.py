"""The tile layout: its sizes, and the algebra that lets its bytes be operands of mma.m16n8k16, in NumPy."""

import numpy as np
import pytest

from llmcli.kernels.tiles import stored_group_size, tile_layout
from llmcli.lab.matrices import aligned_zeros, random_matrix, tiles_of
from llmcli.quantization.rounding import E4M3_VALUES


def mma(a: np.ndarray, b: np.ndarray, sums: np.ndarray) -> None:
    """One mma.m16n8k16 on fragments as the PTX ISA places them.

    Shapes: a [32 lanes, 4 registers, 2], b [32, 2, 2], sums [32, 4] in-out; lane = 4 * group + thread in group
    """
    matrix_a, matrix_b = np.zeros((16, 16)), np.zeros((16, 8))
    for lane in range(32):
        group, thread = divmod(lane, 4)
        for i in range(8):  # a0 .. a7
            row = group if i in (0, 1, 4, 5) else group + 8
            matrix_a[row, thread * 2 + (i & 1) + (8 if i >= 4 else 0)] = a[lane, i // 2, i % 2]
        for i in range(4):  # b0 .. b3
            matrix_b[thread * 2 + (i & 1) + (8 if i >= 2 else 0), group] = b[lane, i // 2, i % 2]
    product = matrix_a @ matrix_b
    for lane in range(32):
        group, thread = divmod(lane, 4)
        for i in range(4):  # c0 .. c3
            sums[lane, i] += product[group if i < 2 else group + 8, thread * 2 + (i & 1)]


def part_values(weight_type: str, lane_bytes: np.ndarray, part: int) -> list[float]:
    """The 8 weights of one part in the order of unpack_part: four registers of two."""
    if weight_type == "int8":
        return [float(byte) - 128 for byte in lane_bytes[8 * part : 8 * part + 8]]
    if weight_type == "int4":
        word = int.from_bytes(lane_bytes[4 * part : 4 * part + 4].tobytes(), "little")
        # The masks 0x000f000f and 0x00f000f0 on the word and on the word >> 8.
        return [float(word >> shift & 15) - 8 for i in range(4) for shift in (4 * i, 4 * i + 16)]
    if weight_type == "fp8":
        words = [int.from_bytes(lane_bytes[at : at + 4].tobytes(), "little") for at in (8 * part, 8 * part + 4)]
        return [value for word in words for value in widened_fp8(word)]
    return [float(value) for value in lane_bytes.view(np.float16)]


def widened_fp8(word: int) -> list[float]:
    """Four e4m3 codes by the shifts and masks of widen_fp8: two registers of two fp16 numbers, times FP8_UNIT."""
    pairs = [(word << 8, word << 7), (word, word >> 1)]
    bits = [(signs & 0x80008000) | (rest & 0x3F803F80) for signs, rest in pairs]
    return [256 * float(value) for value in np.array(bits, np.uint32).view(np.float16)]


def columns_of(weight_type: str, x: np.ndarray, parts: int) -> np.ndarray:
    """One unit of 8 columns of x, inputs in unpack_part's order. Shapes: x [8, unit_inputs]; result [part, 8, t, 8]"""
    stored = np.full((parts, 8, 4, 8), np.nan)
    for k in range(x.shape[1]):
        eighth, place = divmod(k, 8)
        if weight_type == "fp8":
            place = [0, 2, 1, 3, 4, 6, 5, 7][place]
        stored[eighth % parts, :, eighth // parts, place] = x[:, k]
    return stored


def test_every_e4m3_code_is_widened_exactly() -> None:
    codes = [code for code in range(256) if code & 0x7F != 0x7F]
    words = np.array(codes[:252], np.uint8).reshape(-1, 4)
    for first, second, third, fourth in [*words.tolist(), codes[-4:]]:
        word = first | second << 8 | third << 16 | fourth << 24
        assert widened_fp8(word) == [float(E4M3_VALUES[code]) for code in (first, third, second, fourth)]


@pytest.mark.parametrize("weight_type", ["int8", "int4", "fp8", "float16"])
def test_tile_bytes_are_mma_operands(weight_type: str) -> None:
    """Units through emulated tensor cores give the product of the rows; the tail and missing rows count nothing."""
    layout = tile_layout(weight_type, 1, 1, None, None if weight_type == "float16" else "float32")
    inputs = 3 * layout.unit_inputs - 24
    stored = random_matrix(0, weight_type, 37, inputs)
    exact = stored.values.astype(np.float64) - {"int8": 128, "int4": 8}.get(weight_type, 0)
    if weight_type == "fp8":
        exact = E4M3_VALUES[stored.values].astype(np.float64)
    matrix = tiles_of(stored)
    layout = matrix.layout
    x = np.zeros((8, layout.num_units * layout.unit_inputs))
    x[:, :inputs] = np.random.default_rng(1).integers(-8, 9, (8, inputs))
    parts = layout.unit_inputs // 32
    result = np.zeros((layout.padded_rows, 8))
    for tile in range(layout.num_tiles):
        sums = np.zeros((32, 4))
        for unit in range(layout.num_units):
            vectors = matrix.tiles[tile, unit].reshape(2, 32, 16)
            span = slice(unit * layout.unit_inputs, (unit + 1) * layout.unit_inputs)
            columns = columns_of(weight_type, x[:, span], parts)
            for part in range(parts):
                low = np.array([part_values(weight_type, vectors[0, lane], part) for lane in range(32)])
                high = np.array([part_values(weight_type, vectors[1, lane], part) for lane in range(32)])
                b = np.array([columns[part, lane // 4, lane % 4] for lane in range(32)])
                for step in (0, 4):  # the two k-steps of a part: registers [0], [1] and [2], [3]
                    first, second = slice(step, step + 2), slice(step + 2, step + 4)
                    a = np.stack((low[:, first], high[:, first], low[:, second], high[:, second]), axis=1)
                    mma(a, np.stack((b[:, first], b[:, second]), axis=1), sums)
        for lane in range(32):
            group, thread = divmod(lane, 4)
            for i in range(4):
                row = 16 * tile + group + (8 if i >= 2 else 0)
                result[row, 2 * thread + (i & 1)] = sums[lane, i]
    assert np.array_equal(result[:37], exact @ x[:, :inputs].T)
    assert not result[37:].any()


def test_sizes_of_a_matrix() -> None:
    layout = tile_layout("int4", 100, 300, 64, "bfloat16", is_symmetric=False)
    assert (layout.unit_inputs, layout.num_units, layout.num_tiles, layout.padded_rows) == (128, 3, 7, 112)
    assert layout.num_groups == 6  # of three whole units, not only the five that have inputs
    assert layout.tiles_bytes == 7 * 3 * 1024
    assert layout.scales_bytes == 112 * 6 * 2
    assert layout.zero_points_bytes == 112 * 6
    assert layout.num_bytes == 21504 + 1344 + 672
    assert layout.arena_bytes == 21504 + 1536 + 768


def test_a_tile_has_whole_spans() -> None:
    """Two units of int8 are multiplied together; a group that holds a whole row holds whole spans, too."""
    odd = tile_layout("int8", 16, 3 * 64, 64, "bfloat16")
    assert (odd.unit_inputs, odd.span_inputs, odd.num_spans, odd.num_units, odd.num_groups) == (64, 128, 2, 4, 4)
    assert odd.tiles_bytes == 4 * 1024
    assert [tile_layout(kind, 16, 192).num_units for kind in ("float16", "float32")] == [8, 12]
    for num_inputs, group_size in ((40, 128), (100, 128), (200, 256)):
        assert tile_layout("int8", 16, num_inputs, None, "float32", is_symmetric=False).group_size == group_size


@pytest.mark.parametrize(
    ("weight_type", "group_size", "num_inputs", "is_symmetric", "expected"),
    [
        ("int8", 128, 4096, True, 128),
        ("int8", 32, 4096, True, 32),
        ("int8", 96, 4096, True, 32),  # each scale three times
        ("int8", None, 4096, True, None),
        ("int8", 4096, 4096, True, None),
        ("int4", None, 11008, False, 16384),
        ("int4", None, 40, False, 128),
        ("int4", 16, 4096, True, 16),
    ],
)
def test_group_sizes_as_stored(
    weight_type: str, group_size: int | None, num_inputs: int, is_symmetric: bool, expected: int | None
) -> None:
    assert stored_group_size(weight_type, group_size, num_inputs, is_symmetric) == expected


def test_groups_too_small_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 24 int4 weights; a multiple of 16"):
        stored_group_size("int4", 24, 4096, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("int8", 0, 64, None, "float32"), "has no tiles"),
        (("int8", 16, 64), "scales of type None"),
        (("float16", 16, 64, None, "float16"), "scales of type float16"),
        (("float16", 16, 64, 32), "neither groups"),
    ],
)
def test_impossible_matrices_are_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tile_layout(*arguments)  # type: ignore[arg-type]


def test_a_matrix_lies_in_its_arena() -> None:
    layout = tile_layout("int8", 40, 100, 32, "float16", is_symmetric=False)
    memory = aligned_zeros(layout.arena_bytes)
    matrix = layout.place(memory)
    assert matrix.tiles.shape == (3, 2, 1024)
    assert matrix.scales.shape == matrix.zero_points.shape == (3, 4, 16)
    for number, array in enumerate((matrix.tiles, matrix.scales, matrix.zero_points), start=1):
        assert array.ctypes.data % 256 == 0
        array.view(np.uint8)[...] = number
    assert [np.count_nonzero(memory == number) for number in (1, 2, 3)] == [6144, 384, 192]
    with pytest.raises(ValueError, match="cannot hold"):
        layout.place(memory[:-1])
