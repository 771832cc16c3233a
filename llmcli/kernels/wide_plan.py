"""How products of tokens in fp16 are cut into work: those of few tokens for gemm_narrow, of many for gemm_wide."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from llmcli.kernels.chunks import num_spans
from llmcli.kernels.stage_wide import IMAGE_TOKENS, STEP_INPUTS, WIDE_TOKENS, num_steps
from llmcli.kernels.tiles import BLOCK_SCALE, SCALE_C_TYPES, TILE_ROWS, TileLayout, Widening, fastest_widening

CLUSTER = 2  # blocks that share tokens
BLOCK_TILES = 8  # of a block of gemm_wide

# The share of the rate of a large product of the matrix library at which blocks of each size compute, and how much
# larger it is where one wave leaves nearly all multiprocessors idle. Fitted to prompts of 128 to 8,000 tokens and steps
# of 256 rows of Llama-3.1-8B on an H200 (docs/log/2026-11-27-wide.md).
_SHARES = {128: 0.74, 256: 0.91}
_FASTER_ALONE = 0.5
_LEAST_GROUP = 16  # inputs; a lane has one scale
_SCALED = ("int8", "int4", "fp8")
_HALF_TYPES = ("float16", "bfloat16")


def takes(layout: TileLayout) -> bool:
    """Whether the kernels take such a matrix: codes and 8-bit floats in groups of 16 inputs or more.

    Also weights of 16 bits.
    """
    if layout.weight_type in _HALF_TYPES:
        return True
    return layout.weight_type in _SCALED and (layout.group_size is None or layout.group_size >= _LEAST_GROUP)


def takes_wgmma(layout: TileLayout) -> bool:
    """Whether gemm_narrow and gemm_wide take such a matrix, on cards that can: not with scales of blocks."""
    return takes(layout) and layout.scale_type != BLOCK_SCALE


@dataclass(frozen=True)
class NarrowForm:
    """Blocks of gemm_narrow: `tiles` tiles times up to `tokens` tokens. `blocks` of them share a multiprocessor.

    `span_time`: how long a span takes in such blocks, relative to the largest ones
    """

    tokens: int
    tiles: int
    blocks: int
    span_time: float = 1


# Small blocks load the multiprocessors more evenly, if all of them run at once. Large ones read each token from L2 less
# often. The time is fitted to the products of Llama-3.1-8B with 64 tokens on an H200 (docs/log/2026-11-27-wide.md).
NARROW_FORMS = (NarrowForm(16, 4, 4), NarrowForm(32, 8, 2), NarrowForm(64, 4, 3, 0.85), NarrowForm(64, 8, 2))
NARROW_TOKENS = tuple(dict.fromkeys(form.tokens for form in NARROW_FORMS))
MAX_NARROW_TOKENS = max(NARROW_TOKENS)


@dataclass(frozen=True)
class NarrowPlan:
    """How gemm_narrow is launched: blocks of a form, in `num_clusters` clusters that take pieces in turn.

    `spans`: those that the busiest clusters multiply, one after the other
    """

    form: NarrowForm
    num_clusters: int
    spans: int

    @property
    def span_times(self) -> float:
        """The time of these spans, in spans of the largest blocks."""
        return self.spans * self.form.span_time


@cache
def plan_narrow(layout: TileLayout, num_tokens: int, num_multiprocessors: int, num_parts: int = 1) -> NarrowPlan:
    """The launch for up to 64 tokens that takes the least time. No choice changes a bit."""
    plans = (plan_form(layout, form, num_multiprocessors, num_parts) for form in narrow_forms(num_tokens))
    return min(plans, key=lambda one: one.span_times)


def narrow_forms(num_tokens: int) -> list[NarrowForm]:
    """The forms for `num_tokens` tokens, from small blocks to large ones."""
    tokens = next(one for one in NARROW_TOKENS if one >= num_tokens)
    return [one for one in NARROW_FORMS if one.tokens == tokens]


def plan_form(layout: TileLayout, form: NarrowForm, num_multiprocessors: int, num_parts: int) -> NarrowPlan:
    """The launch in blocks of a form."""
    num_pieces = num_parts * _items(layout) * BLOCK_TILES // form.tiles
    num_clusters = min(num_pieces, num_multiprocessors * form.blocks // CLUSTER)
    spans = -(-num_pieces // num_clusters) * -(-num_spans(layout) // num_parts)
    return NarrowPlan(form, num_clusters, spans)


@dataclass(frozen=True)
class WidePlan:
    """How gemm_wide is launched: blocks of `tokens` tokens, in `num_clusters` clusters that take pieces in turn.

    `library_flops`: what the matrix library would compute in the same time. No choice changes a bit.
    """

    tokens: int
    num_items: int
    num_clusters: int
    library_flops: float


@cache
def plan_wide(layout: TileLayout, num_tokens: int, num_multiprocessors: int, num_parts: int = 1) -> WidePlan:
    """The launch whose blocks take the least time on a card of `num_multiprocessors`."""
    # An image of few tokens has no room for large blocks.
    possible = [IMAGE_TOKENS] if num_tokens <= IMAGE_TOKENS else WIDE_TOKENS
    plans = (_plan(layout, num_tokens, num_multiprocessors, tokens, num_parts) for tokens in possible)
    return min(plans, key=lambda one: one.library_flops)


def _plan(layout: TileLayout, num_tokens: int, num_multiprocessors: int, tokens: int, num_parts: int = 1) -> WidePlan:
    num_items, most = num_parts * -(-num_tokens // tokens) * _items(layout), num_multiprocessors // CLUSTER
    # All clusters take as long as the busiest.
    waves, outputs = -(-num_items // most), most * CLUSTER * BLOCK_TILES * TILE_ROWS
    computed = 2 * waves * outputs * tokens * num_steps(layout.num_inputs) * STEP_INPUTS / num_parts
    share = _SHARES[tokens] * (1 + _FASTER_ALONE * (1 - num_items / most) * (waves == 1))
    return WidePlan(tokens, num_items, min(num_items, most), computed / share)


def all_forms() -> Iterator[tuple[TileLayout, Widening]]:
    """A matrix for each variant of the kernels, except for the number of tokens."""
    for weight_type in _SCALED:
        for scale_type in (name for name in SCALE_C_TYPES if name != BLOCK_SCALE):
            for group_size in (64, 128) if weight_type != "fp8" else (128,):
                layout = TileLayout(weight_type, TILE_ROWS, 4096, group_size, scale_type)
                yield layout, fastest_widening(layout)
                if scale_type == "bfloat16":
                    yield layout, "floats"
    for weight_type in _HALF_TYPES:
        yield TileLayout(weight_type, TILE_ROWS, 4096), "floats"


def _items(layout: TileLayout) -> int:
    """How many clusters of gemm_wide cover all outputs, each with all tokens of a block."""
    return -(-layout.num_tiles // (CLUSTER * BLOCK_TILES))
