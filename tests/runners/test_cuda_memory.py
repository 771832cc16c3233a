"""The memory plan of the CUDA runner: exact sums, fits and refusals, without a card."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quantized import SIZES, export
from simulated_card import allocate
from tiny_models import CONFIG, write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.config.llama import LlamaConfig
from llmcli.errors import InsufficientMemoryError, UnsupportedModelError
from llmcli.kernels.launches import TYPICAL_CARD
from llmcli.quantization.schemes import ExportOptions, WeightScheme
from llmcli.runners.base import Arithmetic, Limits
from llmcli.runners.cuda.plan.memory import RESERVED_BYTES, fit_memory, fitting_context, plan_memory
from llmcli.runners.cuda.plan.regions import held_bytes, lay_out
from llmcli.runners.cuda.plan.stored import StoredModel
from llmcli.runners.cuda.step.arena import card_memory
from llmcli.runners.cuda.step.batch import LONG, SHORT
from llmcli.runners.cuda.step.device import CudaDevice
from llmcli.runners.step_device import SINGLE

LLAMA2_7B = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
}


def config(**overrides: Any) -> LlamaConfig:
    return LlamaConfig.from_dict({**CONFIG, **overrides}, "config.json")


def test_bytes_of_a_well_known_model() -> None:
    stored = StoredModel.of_config(config(**LLAMA2_7B), stored_dtype="bfloat16", scheme=WeightScheme(8, 128))
    plan = plan_memory(stored, max_seq_len=4096, num_rows=2)
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11008
    codes, scales = 32 * layer, 32 * layer // 128 * 2
    head_and_embedding = 2 * 2 * 32000 * 4096
    norms, table = 4 * (2 * 32 + 1) * 4096, 4096 * 128 * 4
    assert plan.weight_bytes == codes + scales + head_and_embedding + norms + table
    assert plan.cache_bytes == 2 * 2 * 32 * 4096 * 4096 * 2
    assert plan.total_bytes > plan.weight_bytes + plan.cache_bytes + RESERVED_BYTES


def test_a_tied_head_takes_no_memory_of_its_own() -> None:
    tied, untied = (
        StoredModel.of_config(config(**LLAMA2_7B, tie_word_embeddings=tied), stored_dtype="bfloat16")
        for tied in (True, False)
    )
    with_head, without = (plan_memory(one, max_seq_len=4096, num_rows=2).weight_bytes for one in (untied, tied))
    assert with_head - without == 2 * 32000 * 4096


def test_a_plan_needs_no_files_and_is_that_of_the_files(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, dtype=torch.bfloat16, **SIZES)
    folder = export(source, tmp_path / "model", ExportOptions(WeightScheme(4, 64)))
    imagined = StoredModel.of_config(config(**SIZES), stored_dtype="bfloat16", scheme=WeightScheme(4, 64))
    plans = [
        plan_memory(stored, max_seq_len=100, num_rows=1)
        for stored in (StoredModel.of_model(open_model(folder)), imagined)
    ]
    assert plans[0].weights == plans[1].weights
    assert plans[0].cache == plans[1].cache
    assert plans[0].workspace == plans[1].workspace
    assert plans[0].staging == plans[1].staging


@pytest.mark.parametrize(
    ("num_rows", "dtype", "num_absent"),
    [(3, "bfloat16", 3), (20, "bfloat16", 3), (40, "float32", 4), (40, "bfloat16", 1)],
)
def test_arrays_do_not_overlap(num_rows: int, dtype: str, num_absent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcli.runners.cuda.step.arena.allocate", allocate)
    stored = StoredModel.of_config(config(), stored_dtype=dtype, scheme=WeightScheme(8, 128))
    plan = plan_memory(stored, max_seq_len=99, num_rows=num_rows)
    memory = card_memory(held_bytes(plan.workspace))
    workspace = lay_out(plan.workspace, memory)
    arrays = [array for array in vars(workspace).values() if array is not None]
    # Many rows need memory for their attention where the cache is not of float32, as spans do; inputs that are ordered
    # need some, which are not there.
    assert len(arrays) == len(vars(workspace)) - num_absent
    places = sorted((array.data.ptr, array.nbytes) for array in arrays)
    for (begin, size), (following, _) in zip(places, places[1:], strict=False):
        assert begin % 256 == 0
        assert begin + size <= following
    assert places[-1][0] + places[-1][1] <= memory.data.ptr + memory.nbytes
    with pytest.raises(ValueError, match="do not fit"):
        lay_out(plan.workspace, memory[:-256])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_type_asked_for_decides(dtype: str) -> None:
    stored = StoredModel.of_config(config(), stored_dtype="bfloat16", dtype=dtype)
    plan = plan_memory(stored, max_seq_len=64, num_rows=1)
    itemsize = {"float16": 2, "float32": 4}[dtype]
    assert plan.cache_bytes == 2 * 3 * 2 * 64 * 8 * itemsize
    assert stored.precision == stored.embedding_type == dtype


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_cache_of_codes_has_a_scale_for_each_vector(dtype: str) -> None:
    stored = StoredModel.of_config(config(), stored_dtype="bfloat16", dtype=dtype, kv_cache="int8")
    plan = plan_memory(stored, max_seq_len=64, num_rows=1)
    assert plan.cache_bytes == 2 * 3 * 2 * 64 * (8 + 4)
    assert (stored.cache_type, stored.attention_type) == ("int8", "float16")


def test_a_refusal_names_the_smaller_cache_where_it_fits() -> None:
    stored = StoredModel.of_config(config(**LLAMA2_7B), stored_dtype="bfloat16", scheme=WeightScheme(4, 128))
    with pytest.raises(InsufficientMemoryError, match=r"use --context \d+ or less, or --kv-cache int8$"):
        fit_memory(stored, "here", max_seq_len=4096, num_rows=1, available=6 * 2**30)
    with pytest.raises(InsufficientMemoryError, match=r"use --context \d+ or less$"):
        fit_memory(stored, "here", max_seq_len=4096, num_rows=1, available=5 * 2**30)


@pytest.mark.parametrize(
    ("gib", "remedy"),
    [
        (6.5, "make it int4 with llmcli quantize --bits 4"),
        (5, r"make it int4 with llmcli quantize --bits 4 and use --context \d+ or less"),
        (3, "use a smaller model"),
    ],
)
@pytest.mark.parametrize("scheme", [None, WeightScheme(8, 128)])
def test_a_refusal_names_int4_where_it_fits_and_the_cpu_where_it_is(
    gib: float, remedy: str, scheme: WeightScheme | None
) -> None:
    stored = StoredModel.of_config(config(**LLAMA2_7B), stored_dtype="bfloat16", scheme=scheme)
    available = int(gib * 2**30)
    for is_here, end in ((True, ", or use --device cpu"), (False, "")):
        with pytest.raises(InsufficientMemoryError, match=f"is available: {remedy}{end}$"):
            fit_memory(stored, "here", max_seq_len=4096, num_rows=1, available=available, is_here=is_here)


def test_the_context_that_fits_is_the_largest() -> None:
    stored = StoredModel.of_config(config(**LLAMA2_7B), stored_dtype="bfloat16", scheme=WeightScheme(4, 128))
    available = 6 * 2**30
    context = fitting_context(stored, num_rows=1, available=available, chunk_tokens=256)
    assert 128 < context < 4096
    for length, fits in ((context, True), (context + 1, False)):
        plan = plan_memory(stored, max_seq_len=length, num_rows=1, chunk_tokens=256)
        assert (plan.total_bytes <= available) == fits
    refusal = rf"here with context 4096 needs .* is available: use --context {context} or less"
    with pytest.raises(InsufficientMemoryError, match=refusal):
        fit_memory(stored, "here", max_seq_len=4096, num_rows=1, available=available)
    wide = plan_memory(stored, max_seq_len=context, num_rows=1, chunk_tokens=2048).total_bytes
    for room, is_wide in ((wide, True), (wide - 1, False)):
        found = fit_memory(stored, "here", max_seq_len=context, num_rows=1, available=room)
        assert (found.chunk_tokens == 2048) == is_wide


def test_rows_are_given_up_before_the_run_is() -> None:
    stored = StoredModel.of_config(config(**LLAMA2_7B), stored_dtype="bfloat16", scheme=WeightScheme(8, 128))
    room = {"max_seq_len": 4096, "num_rows": 8, "available": 10 * 2**30}
    assert fit_memory(stored, "here", allows_less=True, **room).num_rows == 1
    with pytest.raises(InsufficientMemoryError, match="--context"):
        fit_memory(stored, "here", **room)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"head_dim": 12}, "head_dim is 12, expected a multiple of 8"),
        ({"head_dim": 512}, "head_dim is 512"),
        ({"vocab_size": 2**20}, "vocab_size is 1048576"),
    ],
)
def test_shapes_that_no_kernel_has_are_refused(overrides: dict[str, int], message: str) -> None:
    stored = StoredModel.of_config(config(**overrides), stored_dtype="float32")
    with pytest.raises(UnsupportedModelError, match=f"{message}.*--device cpu"):
        plan_memory(stored, max_seq_len=64, num_rows=1)


def test_groups_that_no_kernel_reads_are_refused() -> None:
    stored = StoredModel.of_config(config(), stored_dtype="float32", scheme=WeightScheme(8, 4))
    with pytest.raises(UnsupportedModelError, match="groups of 4.*--device cpu"):
        plan_memory(stored, max_seq_len=64, num_rows=1)


def test_the_workspace_grows_with_the_card() -> None:
    """Attention cuts a row into more parts where more multiprocessors can have one."""
    stored = StoredModel.of_config(config(), stored_dtype="float32")
    small, large = (
        plan_memory(stored, max_seq_len=512, num_rows=1, card=replace(TYPICAL_CARD, num_multiprocessors=count))
        for count in (2, 132)
    )
    assert small.workspace.partials.shape[2] < large.workspace.partials.shape[2]
    assert (small.weights, small.cache) == (large.weights, large.cache)


def test_a_prompts_length_decides_how_it_is_multiplied() -> None:
    nothing: Any = None
    forward: Any = SimpleNamespace(chunk_tokens=2048, config=SimpleNamespace(vocab_size=256), device=None)
    workspace: Any = SimpleNamespace(page_table=SimpleNamespace(shape=(1, 256)), lane_logits=[], score_logits=[])
    device = CudaDevice(
        forward, nothing, workspace, nothing, uses_graphs=False,
        limits=Limits(1, 4096, 256, works_ahead=True), cache_type="float16", description="",
        arithmetic=Arithmetic("auto", "auto", None, ()),
    )  # fmt: skip
    assert [device.method(0, count) for count in (8, 9, 64, 65, 2048)] == [SINGLE, SHORT, SHORT, LONG, LONG]
    assert device.method(2047, 2048 + 9) == LONG
    assert device.method(2048, 2048 + 9) == SHORT


# Fewer pages, then fewer rows

LLAMA3_8B = {
    **LLAMA2_7B,
    "vocab_size": 128256,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
GIB = 2**30


def test_less_is_given_only_where_it_must_be() -> None:
    """Prompts get narrower first (`PREFILL_CHUNKS`), then pages shrink to two full rows' for any number of rows."""
    stored = StoredModel.of_config(config(**LLAMA2_7B), stored_dtype="bfloat16", scheme=WeightScheme(8, 128))
    sizes: dict[str, Any] = {"max_seq_len": 4096, "num_rows": 8}
    pages_of_row = 4096 // 16
    whole = plan_memory(stored, **sizes)
    seen = set()
    for quarters in range(36, 120):
        available = quarters * GIB // 4
        try:
            plan = fit_memory(stored, "here", available=available, allows_less=True, **sizes)
        except InsufficientMemoryError:
            assert plan_memory(stored, max_seq_len=4096, num_rows=1, chunk_tokens=256).total_bytes > available
            continue
        assert plan.total_bytes <= available
        assert min(2, plan.num_rows) * pages_of_row <= plan.num_pages <= plan.num_rows * pages_of_row
        assert plan.cache_bytes == plan.num_pages * 2 * 32 * 32 * 16 * 128 * 2
        if whole.total_bytes <= available:
            assert plan == whole
            seen.add("all")
        elif plan.num_rows == 8:
            # No page more would have fitted.
            assert plan.total_bytes + plan.cache_bytes // plan.num_pages > available
            seen.add("fewer pages")
        else:
            smallest = {"max_seq_len": 4096, "num_rows": plan.num_rows + 1, "num_pages": 2 * pages_of_row}
            assert plan_memory(stored, chunk_tokens=256, **smallest).total_bytes > available
            seen.add("fewer rows")
    assert seen == {"all", "fewer pages", "fewer rows"}


def test_pages_that_are_fewer_than_a_text_s_are_refused() -> None:
    stored = StoredModel.of_config(config(**LLAMA2_7B), stored_dtype="bfloat16", scheme=WeightScheme(8, 128))
    one_row = plan_memory(stored, max_seq_len=4096, num_rows=1, chunk_tokens=256).total_bytes
    room: dict[str, Any] = {"max_seq_len": 4096, "num_rows": 8, "allows_less": True}
    plan = fit_memory(stored, "here", available=one_row, **room)
    assert (plan.num_rows, plan.num_pages) == (1, 256)
    with pytest.raises(InsufficientMemoryError, match="use --context"):
        fit_memory(stored, "here", available=one_row - 1, **room)


def test_many_rows_go_down_to_few() -> None:
    """From 256 rows on by halves to a pass of lanes, then one by one."""
    stored = StoredModel.of_config(config(**LLAMA3_8B), stored_dtype="bfloat16", scheme=WeightScheme(8, 128))
    found = [
        fit_memory(stored, "here", max_seq_len=8192, num_rows=256, available=gib * GIB, allows_less=True).num_rows
        for gib in range(12, 20)
    ]
    assert found == sorted(found)
    assert set(found) <= {256, 128, 64, 32, 16, *range(1, 9)}


def test_one_row_takes_no_more_than_it_did_without_pages() -> None:
    """The numbers are those of rows that each had their own whole cache: nothing but the workspace has changed.

    And the sampler's state, which has room for a mask since: a bit for each token, up to a line of 128 bytes.
    """
    mask_bytes = -(-LLAMA3_8B["vocab_size"] // 8 // 128) * 128
    stored = StoredModel.of_config(config(**LLAMA3_8B), stored_dtype="bfloat16", scheme=WeightScheme(8, 128))
    for chunk_tokens, total_bytes in ((None, 11_111_148_160), (256, 10_842_610_560)):
        plan = plan_memory(stored, max_seq_len=8192, num_rows=1, chunk_tokens=chunk_tokens)
        assert plan.weight_bytes == 9_194_979_328
        assert plan.cache_bytes == 2 * 32 * 8 * 8192 * 128 * 2
        assert plan.total_bytes <= total_bytes + mask_bytes


NO_WGMMA = replace(TYPICAL_CARD, can_wgmma=False)


@pytest.mark.parametrize(
    ("num_rows", "max_seq_len", "most"), [(1, 64, 64), (1, 4096, 256), (9, 100, 100), (300, 64, 304)]
)
def test_chunks_of_many_rows_have_memory(num_rows: int, max_seq_len: int, most: int) -> None:
    """A product with 512 inputs has four chunks: chunks after the first have sums of their own, for all rows or tokens
    of short prompts. Up to 8 rows need none; a scored text needs them for 64 rows of the head."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    stored = StoredModel.of_config(config(**sizes, head_dim=64), stored_dtype="bfloat16", scheme=WeightScheme(8, 128))
    plan = plan_memory(stored, max_seq_len=max_seq_len, num_rows=num_rows)
    others = plan.workspace.others
    assert others is not None
    assert others.shape == (3 * most * (8 + 2 * 4) * 64,)
    no_wgmma = plan_memory(stored, max_seq_len=max_seq_len, num_rows=num_rows, card=NO_WGMMA)
    assert no_wgmma.workspace.others == others
    small_groups = StoredModel.of_config(config(**sizes), stored_dtype="bfloat16", scheme=WeightScheme(8, 8))
    others = plan_memory(small_groups, max_seq_len=64, num_rows=8).workspace.others
    assert others is not None
    assert others.shape == (3 * 64 * 288,)
