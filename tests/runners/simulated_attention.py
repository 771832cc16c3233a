"""The CUDA runner's rotary, cache and attention kernels, by numpy; every token and lane separately."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from simulated_kernels import floats, normed, on_host, store
from simulated_wide import write_image_rows

from llmcli.kernels.attention_decode import LaneInputs
from llmcli.kernels.attention_prefill import PromptInputs
from llmcli.kernels.qkv import PAGE_TOKENS, LayerCache
from llmcli.kernels.stage_wide import ImageRows
from llmcli.quantization.rounding import widen


def _rotated(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Shapes: x [n, heads, head_dim]; angles [n, head_dim / 2, 2]."""
    first, second = np.split(x, 2, axis=-1)
    cos, sin = angles[:, None, :, 0], angles[:, None, :, 1]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def _heads(qkv: np.ndarray, offset: int, size: int, head_dim: int) -> np.ndarray:
    return qkv[:, offset : offset + size].reshape(len(qkv), -1, head_dim)


def _append(qkv: np.ndarray, layout: Any, pages: np.ndarray, position: int, cache: LayerCache) -> None:
    """Store one token's keys and values. Shapes: qkv [width]; pages [pages_per_row]."""
    place = int(pages[position // PAGE_TOKENS]), slice(None), position % PAGE_TOKENS
    keys, values, key_scales, value_scales = cache.arrays
    for elements, scales, offset in ((keys, key_scales, layout.k_offset), (values, value_scales, layout.v_offset)):
        heads = qkv[offset : offset + layout.kv_size].reshape(-1, layout.head_dim)
        if scales is None:
            store(elements[place], heads)
            continue
        largest = np.abs(heads).max(-1, keepdims=True)
        scale = largest / np.float32(127)
        on_host(scales[place])[:] = scale[:, 0]
        codes = np.rint(heads / np.where(scale == 0, np.float32(1), scale)) + 128
        on_host(elements[place])[:] = codes.astype(np.uint8)


def _cached(elements: Any, scales: Any, pages: np.ndarray, begin: int, end: int) -> np.ndarray:
    """Shapes: result float32 [num_key_value_heads, end - begin, head_dim]."""
    tokens = np.arange(begin, end)
    places = pages[tokens // PAGE_TOKENS], slice(None), tokens % PAGE_TOKENS
    seen = on_host(elements)[places].swapaxes(0, 1)  # only visible tokens are widened
    if scales is not None:
        return (seen.astype(np.float32) - 128) * on_host(scales)[places].swapaxes(0, 1)[..., None]
    return widen(np.ascontiguousarray(seen), "BF16") if seen.dtype == np.uint16 else seen.astype(np.float32)


def _attend(query: np.ndarray, cache: LayerCache, pages: np.ndarray, position: int, window: int | None) -> np.ndarray:
    begin = 0 if window is None else max(0, position + 1 - window)
    keys, values, key_scales, value_scales = cache.arrays
    k, v = (_cached(*pair, pages, begin, position + 1) for pair in ((keys, key_scales), (values, value_scales)))
    grouped = query.reshape(len(k), -1, query.shape[-1])
    scores = grouped @ k.transpose(0, 2, 1) / np.sqrt(np.float32(query.shape[-1]))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return ((weights / weights.sum(-1, keepdims=True)) @ v).reshape(-1)


def attention_prefill(device: Any, inputs: PromptInputs, out: Any) -> None:
    start, layout = inputs.start, inputs.layout
    query = _heads(floats(inputs.qkv), 0, layout.q_size, layout.head_dim)
    if inputs.cos_sin is not None:
        query = _rotated(query, floats(inputs.cos_sin)[start : start + len(query)])
    pages = on_host(inputs.pages)
    mixed = np.stack(
        [_attend(one, inputs.cache, pages, start + index, inputs.window) for index, one in enumerate(query)]
    )
    if isinstance(out, ImageRows):
        write_image_rows(out, mixed)
    else:
        store(out, mixed)


def _prepare(prepared: np.ndarray, lanes: LaneInputs) -> np.ndarray:
    """Norm and rotary in place, a lane at a time. Shapes: prepared float32 [R, width], as the result"""
    layout, cos_sin = lanes.layout, lanes.cos_sin
    for lane, position in zip(prepared, on_host(lanes.positions).tolist(), strict=True):
        for offset, size, weight in (
            (0, layout.q_size, lanes.q_norm),
            (layout.k_offset, layout.kv_size, lanes.k_norm),
        ):
            heads = lane[offset : offset + size].reshape(1, -1, layout.head_dim)
            if weight is not None:
                heads = normed(heads, weight, lanes.eps)
            if cos_sin is not None and position < cos_sin.shape[0]:  # an unused lane's may be anything
                heads = _rotated(heads, on_host(cos_sin)[None, position])
            lane[offset : offset + size] = heads.reshape(-1)
    return prepared


def _used(lanes: LaneInputs) -> Iterator[tuple[int, int, int, np.ndarray]]:
    """Number, row, position and pages of each used lane."""
    rows, positions = on_host(lanes.rows).tolist(), on_host(lanes.positions).tolist()
    for lane, (row, position) in enumerate(zip(rows, positions, strict=True)):
        if row >= 0:
            yield lane, row, position, on_host(lanes.page_table)[row]


def append_tokens(
    device: Any, lanes: LaneInputs, *, parts: Any = None, norms_queries: bool = False, rotates_queries: bool = False
) -> None:
    sums, used, queries = _sums(lanes.qkv, parts), on_host(lanes.rows) >= 0, lanes.layout.q_size
    of_queries = replace(lanes, q_norm=lanes.q_norm if norms_queries else None)
    if not rotates_queries:
        of_queries = replace(of_queries, cos_sin=None)
    on_host(lanes.qkv)[used, :queries] = _prepare(sums.copy(), of_queries)[used, :queries]
    prepared = _prepare(sums, lanes)
    for lane, _, position, pages in _used(lanes):
        _append(prepared[lane], lanes.layout, pages, position, lanes.cache)


def _mixed(lanes: LaneInputs, qkv: np.ndarray, counters: Any, *, is_cached: bool) -> Iterator[tuple[int, np.ndarray]]:
    """The outputs of each used lane, from these raw projections."""
    assert not on_host(counters).any()
    layout, prepared = lanes.layout, _prepare(qkv, lanes)
    rows = [row for _, row, _, _ in _used(lanes)]
    assert is_cached or len(set(rows)) == len(rows)
    for lane, _, position, pages in _used(lanes):
        if not is_cached:
            _append(prepared[lane], layout, pages, position, lanes.cache)
        query = prepared[lane, : layout.q_size].reshape(-1, layout.head_dim)
        yield lane, _attend(query, lanes.cache, pages, position, lanes.window)


def _sums(qkv: Any, parts: Any) -> np.ndarray:
    sums = floats(qkv)
    for part in () if parts is None else floats(parts):
        sums += part
    return sums


def attention_decode(
    device: Any, lanes: LaneInputs, *, is_cached: bool, partials: Any, counters: Any, out: Any
) -> None:
    for lane, mixed in _mixed(lanes, floats(lanes.qkv), counters, is_cached=is_cached):
        store(out[lane], mixed)


def attention_span(device: Any, lanes: LaneInputs, *, num_spans: int, out: Any, **memory: Any) -> None:
    """Lane by lane: each appends its token before the next lane reads."""
    rows = on_host(lanes.rows)
    assert num_spans == 1 + np.count_nonzero(np.diff(rows)) == len(set(rows.tolist()))
    for lane in range(len(rows)):
        one = slice(lane, lane + 1)
        attention_decode(device, lanes.of(one), is_cached=False, out=out[one], **memory)


def attention_rows(
    device: Any, lanes: LaneInputs, *, partials: Any, counters: Any, out: Any, parts: Any = None
) -> None:
    for lane, mixed in _mixed(lanes, _sums(lanes.qkv, parts), counters, is_cached=False):
        if isinstance(out, ImageRows):
            write_image_rows(replace(out, first_token=out.first_token + lane), mixed[None])
        else:
            store(out[lane], mixed)
