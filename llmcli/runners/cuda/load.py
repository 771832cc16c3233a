"""Loads a model folder into a `CudaRunner`: memory is planned, kernels are compiled, weights are read onto the card."""

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from llmcli.checkpoint.model import Model
from llmcli.config.llama import LlamaConfig
from llmcli.kernels.cublas import Cublas
from llmcli.kernels.device import Device
from llmcli.kernels.sample_token import SPEC as SAMPLE_TOKEN
from llmcli.runners.cuda.arena import Arena, fetch, free_bytes, send
from llmcli.runners.cuda.decode import Decoder
from llmcli.runners.cuda.dry_run import CardFacts, DryRun, dry_forward, kernel_names, run_every_form
from llmcli.runners.cuda.forward import Forward
from llmcli.runners.cuda.memory import MemoryPlan, fit_memory
from llmcli.runners.cuda.placing import Placement
from llmcli.runners.cuda.products import Products
from llmcli.runners.cuda.rows import Row
from llmcli.runners.cuda.runner import CudaRunner
from llmcli.runners.cuda.sampling import DeviceSampler
from llmcli.runners.cuda.staging import NUM_SLOTS
from llmcli.runners.cuda.stored import StoredModel
from llmcli.runners.cuda.upload import Upload
from llmcli.runners.cuda.weights import place_weights
from llmcli.timeline import Timeline

OnProgress = Callable[[int, int], None]  # bytes read so far, bytes in all


def load(
    model: Model,
    *,
    max_seq_len: int,
    num_rows: int = 1,
    allows_fewer_rows: bool = False,
    dtype: str = "auto",
    kv_cache: str = "auto",
    card: int = 0,
    prefill_chunk: int | None = None,
    uses_graphs: bool = True,
    on_compile: Callable[[int], None] = lambda count: None,
    on_progress: OnProgress = lambda read, total: None,
    device: Device | None = None,
    timeline: Timeline | None = None,
) -> CudaRunner:
    """Read the weights onto a card and allocate everything that running takes.

    `dtype` is that of plain weights, embedding and (where `kv_cache` is auto) the cache, of 16 bits as float16;
    quantized layers keep their codes. `on_compile` gets the number of kernel files to compile, if there are any.
    `device` is an opened card in place of number `card`.
    Raises: InsufficientMemoryError before anything is read, if it does not fit; DeviceError if the card cannot be
            used; CheckpointError for a tensor with NaN or infinity, and for read errors
    """
    timeline = timeline or Timeline()
    with timeline.part("CUDA context"):
        device = device or Device.open(card)
        device.activate()
    stored = StoredModel.of_model(model, dtype, kv_cache)
    plan = fit_memory(
        stored,
        str(model.checkpoint.folder),
        max_seq_len=max_seq_len,
        num_rows=num_rows,
        available=free_bytes(),
        allows_fewer_rows=allows_fewer_rows,
        chunk_tokens=prefill_chunk,
        num_multiprocessors=device.num_multiprocessors,
    )
    with timeline.part("card's memory"):
        weights_arena, cache = Arena(plan.weights), Arena(plan.cache)
        workspace = Arena(plan.workspace, plan.workspace_bytes)
    weights = place_weights(plan, weights_arena)
    staging = workspace.overlay(plan.staging)
    placement = Placement(device, model, plan, weights, staging["scratch"], staging["flags"])
    slots = [staging[f"slot {index}"] for index in range(NUM_SLOTS)]
    # What needs no weights is made ready while the first of them are read.
    with (
        ThreadPoolExecutor(1, "matrix library", initializer=device.activate) as beside,
        Upload(device, placement.pieces(), slots, timeline) as uploading,
    ):
        opening = beside.submit(_open_library, device, workspace["library"], timeline)
        wanted = needed_kernels(device, model, plan, weights_arena, cache, workspace)
        _prepare(device, wanted, on_compile, timeline)
        _take_weights(device, model, placement, uploading, weights_arena, staging, on_progress)
        with timeline.part("matrix library"):
            library = opening.result()
    send(device, weights.cos_sin, rotary_table(model.config, max_seq_len))
    send(device, workspace["unit_scale"], np.ones(plan.chunk_tokens, np.float32))
    send(device, workspace["counters"], np.zeros(workspace["counters"].shape, np.uint32))

    forward = Forward(device, plan, weights, cache, workspace, Products(device, library, workspace["widened"]))
    sampler = DeviceSampler(device, plan.num_rows, model.config.vocab_size)
    decoder = Decoder(forward, sampler, workspace, uses_graphs=uses_graphs)
    rows = [
        Row(index, workspace["prefill_logits"][index], workspace["decode_logits"][index])
        for index in range(plan.num_rows)
    ]
    device.synchronize()
    description = f"{device.name} (cuda:{device.index}), {stored.precision}, KV cache {stored.cache_type}"
    return CudaRunner(
        forward, decoder, rows, max_seq_len=max_seq_len, cache_type=stored.cache_type, description=description
    )


def needed_kernels(
    device: Device, model: Model, plan: MemoryPlan, weights_arena: Arena, cache: Arena, workspace: Arena
) -> Mapping[str, Collection[str]]:
    """The kernels that a model needs, loading included: name expressions by `.cu` stem."""
    dry_run = DryRun(CardFacts.of_device(device))
    run_every_form(dry_forward(dry_run, plan, weights_arena, cache, workspace), workspace)
    stand_in, weights = cast(Device, dry_run), place_weights(plan, weights_arena)
    staging = workspace.overlay(plan.staging)
    for piece in Placement(stand_in, model, plan, weights, staging["scratch"], staging["flags"]).pieces():
        piece.take(staging["slot 0"][: piece.num_bytes])
    return {**kernel_names(dry_run.take()), SAMPLE_TOKEN.stem: SAMPLE_TOKEN.variants}


def _prepare(
    device: Device,
    wanted: Mapping[str, Collection[str]],
    on_compile: Callable[[int], None],
    timeline: Timeline,
) -> None:
    """Load the kernels, compiling what the cache lacks."""
    compiled = 0

    def count(num_files: int) -> None:
        nonlocal compiled
        compiled = num_files
        on_compile(num_files)

    with timeline.part("kernels"):
        device.prepare_all(wanted, count)
    source = f"{compiled} compiled" if compiled else "from the cache"
    timeline.note("kernels", f"{len(wanted)} files, {source}")


def _open_library(device: Device, workspace: Any, timeline: Timeline) -> Cublas:
    with timeline.beside("matrix library"):
        return Cublas(device, workspace)


def _take_weights(
    device: Device,
    model: Model,
    placement: Placement,
    uploading: Upload,
    arena: Arena,
    staging: dict[str, Any],
    on_progress: OnProgress,
) -> None:
    """Raises: CheckpointError"""
    total = sum(info.num_bytes for info in model.tensors.tensors.values())
    send(device, staging["flags"], np.zeros(staging["flags"].shape, np.int32))
    read = placement.place_small(arena, staging["slot 0"])
    device.synchronize()  # slot 0 is free
    uploading.run(lambda done: on_progress(read + done, total))
    placement.check_values(fetch(device, staging["flags"]))


def rotary_table(config: LlamaConfig, max_seq_len: int) -> npt.NDArray[np.float32]:
    """Cosine and sine of every position and pair, times the attention factor, each step rounded to float32.

    Shapes: result [max_seq_len, head_dim / 2, 2]
    """
    positions = np.arange(max_seq_len, dtype=np.float32)
    angles = positions[:, None] * config.rope.inverse_frequencies(config.head_dim)
    table = np.stack((np.cos(angles), np.sin(angles)), axis=-1)
    return table * np.float32(config.rope.attention_factor)
