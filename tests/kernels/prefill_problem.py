"""Attention of a prompt's tokens on a card, compared with float64."""

import numpy as np
from fenced import Fenced, assert_within, fenced, to_host
from kv_codes import layer_cache, upload_cache

from llmcli.kernels.attention_prefill import PromptInputs, attention_prefill
from llmcli.kernels.device import Device
from llmcli.lab.attention import paged, visible_table
from llmcli.lab.cases.attention_prefill import ROW, Case


def upload(array: np.ndarray) -> Fenced:
    import cupy

    fence = fenced(array.shape, array.dtype)
    fence.array[...] = cupy.asarray(array)
    return fence


class Problem(Case):
    """A case on a card."""

    def run(self, device: Device) -> np.ndarray:
        """The kernel's output; nothing but it may change."""
        sources = [paged(cache, self.table) for cache in (self.keys, self.values)]
        qkv, (keys, values) = upload(self.qkv), map(upload_cache, sources)
        pages = upload(visible_table(self.table, np.array([ROW]), np.array([self.start + self.num_tokens - 1]))[ROW])
        out = fenced((self.num_tokens, self.layout.q_size), np.dtype(np.float32))
        inputs = PromptInputs(
            qkv=qkv.array[:, : self.layout.width],
            layout=self.layout,
            cache=layer_cache(keys, values),
            pages=pages.array,
            start=self.start,
            window=self.window,
        )
        attention_prefill(device, inputs, out.array)
        device.synchronize()
        out.check()
        for fence in (qkv, keys, values, pages):
            fence.check()
        assert to_host(qkv.array).tobytes() == self.qkv.tobytes()
        for fence, source in zip((keys, values), sources, strict=True):
            assert fence.download().tobytes() == source.tobytes()
        return to_host(out.array)

    def verify(self, device: Device, tokens: list[int] | None = None) -> None:
        """Compare all tokens, or some of them, with float64."""
        actual = self.run(device)
        chosen = np.arange(self.num_tokens) if tokens is None else np.array(tokens)
        expected = self.expected(chosen)
        assert np.isfinite(actual).all()
        assert_within(actual[chosen], expected.value, expected.error)
