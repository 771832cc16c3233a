"""Loads a model folder onto a card: plans memory, compiles kernels, reads the weights."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from llmcli.checkpoint.model import Model
from llmcli.checkpoint.translation import Translation
from llmcli.config.llama import LlamaConfig
from llmcli.kernels.cache import OnCompile, say_nothing
from llmcli.kernels.device import Device
from llmcli.kernels.gemv import GATED_SCALE
from llmcli.kernels.launches import CardFacts
from llmcli.kernels.sample_token import SPEC as SAMPLE_TOKEN
from llmcli.kernels.sources import text_digest
from llmcli.runners.base import MAX_SPAN, Arithmetic, Limits
from llmcli.runners.cuda.load.upload import Upload
from llmcli.runners.cuda.load.weight_pieces import WeightPieces
from llmcli.runners.cuda.plan.memory import MemoryPlan, fit_memory
from llmcli.runners.cuda.plan.regions import lay_out
from llmcli.runners.cuda.plan.staging import Staging
from llmcli.runners.cuda.plan.stored import StoredModel
from llmcli.runners.cuda.plan.weight_layout import Weights
from llmcli.runners.cuda.plan.workspace import Cache, Workspace
from llmcli.runners.cuda.predict.dry_run import DryModel, kernel_names, phantoms
from llmcli.runners.cuda.step.arena import Mailbox, card_memory, fetch, free_bytes, on_card, send
from llmcli.runners.cuda.step.device import CudaDevice
from llmcli.runners.cuda.step.forward import Forward
from llmcli.runners.cuda.step.sampling import DeviceSampler
from llmcli.runners.stepping import SteppingRunner
from llmcli.timeline import Timeline

MAILBOX_BYTES = 2**20  # half of the pinned memory for copies to the card

OnProgress = Callable[[int, int], None]  # bytes read so far, bytes in all


def load(
    model: Model,
    *,
    max_seq_len: int,
    num_rows: int = 1,
    allows_less: bool = False,
    dtype: str = "auto",
    kv_cache: str = "auto",
    card: int = 0,
    prefill_chunk: int | None = None,
    uses_graphs: bool = True,
    on_compile: OnCompile = say_nothing,
    on_progress: OnProgress = lambda read, total: None,
    device: Device | None = None,
    timeline: Timeline | None = None,
) -> SteppingRunner:
    """Read the weights onto a card and allocate everything that running takes.

    `dtype` is that of plain weights, embedding and (where `kv_cache` is auto) the cache, of 16 bits as float16;
    quantized layers keep their codes. `on_compile` gets the kernels compiled so far and those to compile, if any.
    `device` is an opened card to use in place of number `card`.
    Raises: InsufficientMemoryError before anything is read, if it does not fit; DeviceError if the card cannot be
            used; CheckpointError for a tensor with NaN or infinity, and for read errors
    """
    timeline = timeline or Timeline()
    with timeline.part("CUDA context"):
        device = device or Device.open(card)
        device.activate()
    translation = Translation(model)
    stored, model = StoredModel.of_translation(translation, dtype, kv_cache), translation.model
    plan = fit_memory(
        stored,
        str(model.checkpoint.folder),
        max_seq_len=max_seq_len,
        num_rows=num_rows,
        available=free_bytes(),
        allows_less=allows_less,
        chunk_tokens=prefill_chunk,
        card=device.facts,
    )
    with timeline.part("card's memory"):
        weights: Weights[Any] = on_card(plan.weights)
        cache: Cache[Any] = on_card(plan.cache)
        memory = card_memory(plan.workspace_bytes)
        workspace: Workspace[Any] = lay_out(plan.workspace, memory)
        staging: Staging[Any] = lay_out(plan.staging, memory)
    pieces = WeightPieces(device, model, stored, weights, staging)
    # Prepare what needs no weights while the first of them are read.
    with Upload(device, pieces, staging.slots, timeline, translation.open_reader) as uploading:
        _prepare(device, needed_kernels(model, plan, device.facts), on_compile, timeline)
        total = sum(info.num_bytes for info in model.tensors.tensors.values())
        send(device, staging.flags, np.zeros(staging.flags.shape, np.int32))
        uploading.run(lambda done: on_progress(done, total))
        weights = pieces.checked(fetch(device, staging.flags))
    for part in weights.projections:
        if part.order is not None:
            assert part.format.order is not None  # the inputs of columns that were sorted
            send(device, part.order, np.frombuffer(part.format.order, np.int32))
    send(device, weights.cos_sin, rotary_table(model.config, max_seq_len))
    send(device, workspace.unit_scale, np.ones(plan.chunk_tokens, np.float32))
    send(device, workspace.gated_unit, np.full(plan.chunk_tokens, GATED_SCALE, np.float32))
    send(device, workspace.slot_numbers, np.arange(plan.num_rows, dtype=np.int32))
    counters = workspace.counters, workspace.row_counters, workspace.span_counters
    for zeros in (*counters, workspace.slot_token_ids, workspace.norm_sums):
        if zeros is not None:
            send(device, zeros, np.zeros(zeros.shape, zeros.dtype))

    own_digests = {stem: text_digest(text) for stem, text in sorted(device.own_sources.items())}
    forward = Forward(device, plan, weights, cache, workspace)
    mailbox = Mailbox(device, MAILBOX_BYTES)
    vocab_size, chosen, history = model.config.vocab_size, workspace.slot_token_ids, workspace.history
    sampler = DeviceSampler(device, vocab_size, mailbox, chosen, history)
    device.synchronize()
    return SteppingRunner(
        CudaDevice(
            forward,
            sampler,
            workspace,
            mailbox,
            uses_graphs=uses_graphs,
            limits=Limits(
                plan.num_rows,
                max_seq_len,
                plan.num_pages,
                works_ahead=True,
                max_drafts=MAX_SPAN - 1,
                takes_masks=True,
                joins_prompts=True,
                weight_bytes=plan.weight_bytes,
                cache_bytes=plan.cache_bytes,
            ),
            cache_type=stored.cache_type,
            description=f"{device.name} (cuda:{device.index}), {stored.precision}, KV cache {stored.cache_type}",
            arithmetic=Arithmetic(dtype, kv_cache, None, ("cupy",), own_digests),
        )
    )


def needed_kernels(model: Model, plan: MemoryPlan, card: CardFacts) -> Mapping[str, Collection[str]]:
    """The kernels that a model in our form needs on such a card, also to load it: name expressions by `.cu` stem."""
    dry_model = DryModel(plan, card)
    started = dry_model.every_form()
    staging: Staging[Any] = phantoms(plan.staging, 6)
    for piece in WeightPieces(dry_model.device, model, plan.stored, dry_model.weights, staging).for_kernels():
        piece.take(staging.slots[0][: piece.num_bytes])
    return {**kernel_names(started + dry_model.take()), SAMPLE_TOKEN.stem: SAMPLE_TOKEN.variants}


def _prepare(device: Device, wanted: Mapping[str, Collection[str]], on_compile: OnCompile, timeline: Timeline) -> None:
    """Load the kernels, compiling what the cache lacks."""
    compiled = 0

    def count(done: int, total: int) -> None:
        nonlocal compiled
        compiled = total
        on_compile(done, total)

    with timeline.part("kernels"):
        device.prepare_all(wanted, count)
    source = f"{compiled} compiled" if compiled else "from the cache"
    timeline.note("kernels", f"{sum(map(len, wanted.values()))}, {source}")


def rotary_table(config: LlamaConfig, max_seq_len: int) -> npt.NDArray[np.float32]:
    """Cosine and sine of every position and pair, times the attention factor, each step rounded to float32.

    Shapes: result [max_seq_len, head_dim / 2, 2]
    """
    positions = np.arange(max_seq_len, dtype=np.float32)
    angles = positions[:, None] * config.rope.inverse_frequencies(config.head_dim)
    table = np.stack((np.cos(angles), np.sin(angles)), axis=-1)
    return table * np.float32(config.rope.attention_factor)
