# ruff: noqa
"""us and TFLOP/s of gemm_wide beside widening and the matrix library, in one process, 8B's shapes; then parts left out."""

import sys
import numpy as np, cupy
from llmcli.kernels.cublas import Cublas
from llmcli.kernels.device import Device
from llmcli.kernels.dequantize import dequantize
from llmcli.kernels.gemm_wide import gemm_wide, gemm_wide_swiglu
from llmcli.kernels.stage_wide import image_bytes, stage_wide
from llmcli.kernels.rms_norm import rms_norm
from llmcli.kernels.sources import flatten
from llmcli.kernels.tiles import tile_layout

SHAPES = {
    "qkv": (6144, 4096, "store"),
    "o": (4096, 4096, "add"),
    "gate_up": (28672, 4096, "swiglu"),
    "down": (4096, 14336, "add"),
}
FORM = {"int8": ("int8", 128), "int4": ("int4", 128), "fp8": ("fp8", 128)}


def time_us(device, run, repeats=10):
    with device.stream:
        run(0)
        run(1)
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        times = []
        for _ in range(5):
            begin.record(device.stream)
            for i in range(repeats):
                run(i)
            end.record(device.stream)
            end.synchronize()
            times.append(1e3 * cupy.cuda.get_elapsed_time(begin, end) / repeats)
    return float(np.median(times))


def random_matrix(layout, seed):
    rng = cupy.random.RandomState(seed)
    memory = rng.randint(0, 256, layout.arena_bytes + 256, dtype=cupy.uint8)
    memory = memory[-memory.data.ptr % 256 :][: layout.arena_bytes]
    matrix = layout.place(memory)
    if layout.weight_type == "fp8":
        matrix.tiles[...] &= 0xF7
    matrix.scales[...] = cupy.asarray(0x3A80 + rng.randint(0, 128, matrix.scales.shape)).astype(
        cupy.uint16
    )  # bf16 2^-10
    return matrix


def run_all(device, kinds, tokens, with_library, label=""):
    library = Cublas(device) if with_library else None
    widened = cupy.empty(28672 * 4096 * 2, cupy.uint8)
    for kind in kinds:
        weight_type, group = FORM[kind]
        sums = {}
        for name, (rows, inputs, epilogue) in SHAPES.items():
            layout = tile_layout(weight_type, rows, inputs, group, "bfloat16")
            matrices = [random_matrix(layout, i) for i in range(3)]
            for count in tokens:
                x = cupy.random.RandomState(5).standard_normal((count, inputs), dtype=cupy.float32)
                image = cupy.zeros(image_bytes(inputs, count), cupy.uint8)
                scales = cupy.ones(count, cupy.float32)
                out = cupy.zeros((count, rows), cupy.float32)
                down = tile_layout(weight_type, 4096, rows // 2, group, "bfloat16")
                gated = cupy.zeros(image_bytes(rows // 2, count), cupy.uint8)
                largest = cupy.zeros(count, cupy.uint32)
                device.stream.synchronize()
                cupy.cuda.Device().synchronize()
                stage = time_us(
                    device,
                    lambda i: stage_wide(device, x=x, unit_inputs=layout.unit_inputs, image=image, row_scales=scales),
                )
                common = dict(image=image, row_scales=scales)
                if epilogue == "swiglu":
                    run = lambda i: gemm_wide_swiglu(
                        device,
                        matrix=matrices[i % 3],
                        **common,
                        down=down,
                        out=gated,
                        out_scales=scales,
                        largest=largest,
                    )
                else:
                    run = lambda i: gemm_wide(device, matrix=matrices[i % 3], **common, out=out, epilogue=epilogue)
                wide = time_us(device, run)
                flops = 2 * count * rows * inputs
                line = f"{label}{kind:5} {name:8} {count:5}  wide {wide:7.1f} us {flops / wide * 1e-6:6.0f} TFLOP/s  stage {stage:5.1f}"
                library_us = widen_us = 0.0
                if with_library:
                    plain = widened[: rows * inputs * 2].view(cupy.float16).reshape(rows, inputs)
                    half = x.astype(cupy.float16)
                    cupy.cuda.Device().synchronize()
                    widen_us = time_us(
                        device,
                        lambda i: dequantize(
                            device, matrix=matrices[i % 3], first_tile=0, num_tiles=layout.num_tiles, out=plain
                        ),
                        4,
                    )
                    library_us = time_us(device, lambda i: library.matmul(x=half, weight=plain, out=out))
                    dequantize(device, matrix=matrices[0], first_tile=0, num_tiles=layout.num_tiles, out=plain)
                    library.matmul(x=half, weight=plain, out=out)
                    device.stream.synchronize()
                    expected = out.copy()
                    if epilogue != "swiglu":
                        stage_wide(device, x=x, unit_inputs=layout.unit_inputs, image=image, row_scales=scales)
                        gemm_wide(device, matrix=matrices[0], **common, out=out)
                        device.stream.synchronize()
                        error = float(abs(out - expected).max() / abs(expected).max())
                    else:
                        error = float("nan")
                    line += f"  library {library_us:7.1f} us {flops / library_us * 1e-6:6.0f}  widen {widen_us:6.1f}  diff {error:.1e}"
                print(line, flush=True)
                total = sums.setdefault(count, [0.0, 0.0, 0.0])
                total[0] += wide
                total[1] += library_us
                total[2] += widen_us
        for count, (wide, lib, widen) in sums.items():
            print(
                f"{label}{kind:5} LAYER    {count:5}  wide {wide:7.1f} us; library {lib:7.1f} + widening {widen:6.1f}; 32 layers {32e-3 * wide:.1f} ms and {32e-3 * (lib + widen):.1f}",
                flush=True,
            )


parts = {
    "all": [],
    "no widening": [("loaded.widen(next);", "")],
    "no weights": [("loaded.widen(next);", ""), ("            load(loaded);\n", "")],
    "no results": [
        ("write_floats<TOKENS>(", "if (shape.num_tokens < 0) write_floats<TOKENS>("),
        ("write_gated<TOKENS>(", "if (shape.num_tokens < 0) write_gated<TOKENS>("),
    ],
}
mode = sys.argv[1]
if mode == "times":
    run_all(Device.open(), ["int8"], [128, 256, 2048], True)
    run_all(Device.open(), ["int4", "fp8"], [2048], False)
else:
    for label, changes in parts.items():
        text = flatten("gemm_wide")
        for old, new in changes:
            assert old in text, old
            text = text.replace(old, new)
        device = Device.open(own_sources={"gemm_wide": text} if changes else None)
        run_all(device, ["int8"], [256, 2048], False, f"{label:12} ")
