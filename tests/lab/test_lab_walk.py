"""The walk over a model's launches: against the config's own arithmetic, and on a card against the driver."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.checkpoint.random_weights import shape_model, shape_names
from llmcli.errors import UsageError
from llmcli.kernels.cache import KernelCache
from llmcli.kernels.device import Device
from llmcli.kernels.launches import TYPICAL_CARD
from llmcli.lab.occupancy import MULTIPROCESSORS
from llmcli.lab.walk import LEAST_ROOM, Call, Lengths, Walk, card_of, plan_walk, walk_model
from llmcli.runners.cuda.predict.dry_run import DryModel

MODEL = shape_model("Llama-3.2-1B", "int8")
LAYERS, HIDDEN, INTERMEDIATE, VOCAB = 16, 2048, 8192, 128256  # the published config.json
QKV = 2048 + 2 * 512
LINEARS = {
    "q_proj k_proj v_proj": QKV * HIDDEN,
    "o_proj": HIDDEN * HIDDEN,
    "gate_proj up_proj": 2 * INTERMEDIATE * HIDDEN,
    "down_proj": HIDDEN * INTERMEDIATE,
    "embed_tokens": VOCAB * HIDDEN,  # the head is tied
}
LENGTHS = Lengths.within(131072, 512, 512, 1)


@pytest.fixture(scope="module")
def walks(nvrtc: None) -> tuple[Walk, Walk]:
    return walk_model(MODEL, LENGTHS, TYPICAL_CARD, "sm_90")


def calls_of(walk: Walk, stem: str) -> list[Call]:
    return [call for call in walk.calls if call.launch.stem == stem]


def test_decoding_multiplies_every_matrix_once(walks: tuple[Walk, Walk]) -> None:
    products = calls_of(walks[0], "gemv")
    assert {call.matrix for call in products} == LINEARS.keys()
    for matrix, num_weights in LINEARS.items():
        calls = [call for call in products if call.matrix == matrix]  # the last layer's down leads to no product
        assert sum(len(call.places) for call in calls) == (1 if matrix == "embed_tokens" else LAYERS)
        # int8 with a bf16 scale for 128 weights, and the head in bf16; activations are some kilobytes
        stored = 2 * num_weights if matrix == "embed_tokens" else num_weights * (1 + 2 / 128)
        for call in calls:
            assert call.cost.flops == 2 * num_weights
            assert stored < call.num_bytes < 1.02 * stored


@pytest.mark.parametrize(
    ("form", "arch", "stem"),
    [("int8", "sm_90", "gemm_wide"), ("bf16", "sm_90", "gemm_wide"), ("bf16", "sm_89", "gemm_mma")],
)
def test_a_prompt_multiplies_every_matrix_of_a_layer(nvrtc: None, form: str, arch: str, stem: str) -> None:
    _, prefill = walk_model(shape_model("Llama-3.2-1B", form), LENGTHS, card_of(arch), arch)
    stems = (stem, "gemm_narrow")  # the last layer runs the last token, except for its keys and values
    calls = [call for one in stems for call in calls_of(prefill, one)]
    assert {call.matrix for call in calls} == LINEARS.keys() - {"embed_tokens"}
    for matrix, num_weights in LINEARS.items() - {("embed_tokens", LINEARS["embed_tokens"])}:
        of_matrix = [call for call in calls if call.matrix == matrix]  # SwiGLU has one more, for tokens beyond float16
        is_whole = matrix.startswith("q_proj")
        num_tokens = 512 * LAYERS if is_whole else 512 * (LAYERS - 1) + 1
        assert max(len(call.places) for call in of_matrix) == LAYERS - (not is_whole)
        found = sum(call.cost.flops * len(call.places) for call in of_matrix)
        assert found == 2 * num_weights * num_tokens
        assert all(call.use is not None for call in of_matrix)


def test_places_are_all_launches_once(walks: tuple[Walk, Walk]) -> None:
    for walk in walks:
        places = sorted(itertools.chain.from_iterable(call.places for call in walk.calls))
        assert places == list(range(len(walk.labels)))
        for call in walk.calls:
            assert {walk.labels[place] for place in call.places} == {(call.launch.stem, call.launch.name)}


@pytest.mark.parametrize("rows", [1, 9])
def test_in_order_are_the_launches_that_are_counted(rows: int) -> None:
    lengths = Lengths.within(131072, 300, 100, rows)
    plan = plan_walk(MODEL, lengths, TYPICAL_CARD)
    counted, ordered = DryModel(plan, TYPICAL_CARD), DryModel(plan, TYPICAL_CARD, in_order=True)
    for run in (lambda model: model.step(rows, 100), lambda model: model.span(300, 0, is_last=True)):
        numbers: dict[tuple[str, str], int] = {}
        for one in run(counted):
            numbers[one.launch.stem, one.launch.name] = numbers.get((one.launch.stem, one.launch.name), 0) + one.count
        labels = [(one.launch.stem, one.launch.name) for one in run(ordered)]
        assert {label: labels.count(label) for label in set(labels)} == numbers
        places = [place for place, (stem, _) in enumerate(labels) if stem.startswith("attention")]
        assert len(places) == LAYERS
        assert labels[places[1] : places[2]] == labels[places[2] : places[3]]  # layer by layer


def test_layers_of_two_kinds_keep_their_order(nvrtc: None, tmp_path: Path) -> None:
    """SmolLM3 has layers without rotary; their launches stand where they run."""
    config: dict[str, Any] = {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 0, 1, 0],
    }
    model = open_model(write_tiny_llama(tmp_path / "model", with_tokenizer=False, **config))
    _, prefill = walk_model(model, Lengths.within(256, 100, 20, 1), TYPICAL_CARD, "sm_90")
    appending = {call.launch.grid: call.places for call in calls_of(prefill, "append_tokens")}
    without, rotating = (appending[grid] for grid in sorted(appending))  # of more heads: also the queries
    assert rotating[0] < without[0] < rotating[1] < without[1]


@pytest.mark.parametrize("arch", MULTIPROCESSORS)
def test_a_card_of_an_architecture_has_its_limits(arch: str) -> None:
    card = card_of(arch)
    assert card.shared_bytes_per_block == MULTIPROCESSORS[arch].shared_bytes_per_block
    assert card.can_cluster == (int(arch.removeprefix("sm_")) >= 90)
    assert card.can_wgmma == (arch == "sm_90")


def test_every_launch_fits_a_multiprocessor_of_a_small_card(nvrtc: None) -> None:
    for walk in walk_model(MODEL, LENGTHS, card_of("sm_86"), "sm_86"):
        for call in walk.calls:
            if call.use is not None:
                assert call.use.occupancy.blocks > 0, call.name
                assert call.use.shared_bytes <= 99 * 1024


@pytest.mark.parametrize(
    ("maximum", "asked", "named"),
    [
        (1024, (2000, None, 1), "--prompt is 2000"),
        (4096, (2049, None, 1), "at most 2048"),
        (1024, (None, 1000, 1), f"at most {1024 - LEAST_ROOM}"),
        (1024, (None, None, 1000), "--rows is 1000"),
        (64, (None, None, 1), "context limit is 64"),
    ],
)
def test_lengths_without_room_are_refused(maximum: int, asked: tuple[Any, Any, int], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        Lengths.within(maximum, *asked)


def test_lengths_fit_the_context() -> None:
    assert Lengths.within(131072, None, None, 1) == Lengths(512, 512, 1, 512 + 2048)
    assert Lengths.within(1024, None, None, 2) == Lengths(512, 512, 2, 1024)
    assert Lengths.within(131072, 2048, 1, 1).context == 2049
    short = Lengths.within(300, None, None, 1)
    assert short.context == 300
    assert short.depth + LEAST_ROOM <= 300
    assert short.prompt <= 300


@pytest.mark.cuda
@pytest.mark.parametrize("form", ["int8", "int4", "bf16"])
@pytest.mark.parametrize("name", shape_names())
def test_the_driver_agrees_with_the_occupancy(device: Device, name: str, form: str) -> None:
    """cuOccupancyMaxActiveBlocksPerMultiprocessor over all kernels of the walk."""
    import cupy

    if device.arch not in MULTIPROCESSORS:
        pytest.skip(f"the limits of {device.arch} are not known here")
    cache, model = KernelCache(), shape_model(name, form)
    for lengths in (Lengths.within(4096, 512, 512, 1), Lengths.within(4096, 40, 512, 8)):
        for walk in walk_model(model, lengths, device.facts, device.arch):
            for call in walk.calls:
                if call.use is None:
                    continue
                launch, block = call.launch, math.prod(call.launch.block_shape)
                kernel = launch.stem, launch.name
                cached = cache.get_all([kernel], device.arch)[kernel]
                function = cupy.RawModule(path=str(cached.cubin)).get_function(cached.lowered[launch.name])
                if launch.shared_bytes:
                    function.max_dynamic_shared_size_bytes = launch.shared_bytes
                ask = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor
                assert ask(function.kernel.ptr, block, launch.shared_bytes) == call.use.occupancy.blocks, call.name
