"""Loads a model folder into a `TorchRunner`: memory checked first, then one tensor at a time, each checked for NaN."""

from collections.abc import Callable

import torch
from torch import Tensor

from llmcli.checkpoint.layout import EMBEDDING
from llmcli.checkpoint.model import Model
from llmcli.checkpoint.reader import TensorReader
from llmcli.checkpoint.safetensors_file import TensorInfo
from llmcli.errors import CheckpointError
from llmcli.runners.torch.llama import Layer, Linear, Llama, RMSNorm
from llmcli.runners.torch.memory import DTYPES, STORED_DTYPES, check_memory
from llmcli.runners.torch.runner import TorchRunner

# Elements read and converted at a time: the buffer stays in the cache, and every page touched is one that is kept.
CONVERSION_ELEMENTS = 2**20

OnProgress = Callable[[int, int], None]  # bytes read so far, bytes in all


def load(
    model: Model,
    *,
    max_seq_len: int,
    num_rows: int = 1,
    dtype: str = "float32",
    num_threads: int | None = None,
    on_progress: OnProgress = lambda read, total: None,
) -> TorchRunner:
    """Read the weights and allocate the KV cache.

    Raises: InsufficientMemoryError before anything is read, if weights and cache exceed the free memory;
            CheckpointError for a tensor with NaN or infinity, and for read errors.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    check_memory(model, max_seq_len=max_seq_len, num_rows=num_rows, dtype=dtype)
    weights = _read_weights(model, DTYPES[dtype], on_progress)
    threads = torch.get_num_threads()
    description = f"CPU, {dtype}, {threads} thread{'' if threads == 1 else 's'}"
    llama = _build(model, weights)
    return TorchRunner(llama, max_seq_len=max_seq_len, num_rows=num_rows, description=description)


def _read_weights(model: Model, dtype: torch.dtype, on_progress: OnProgress) -> dict[str, Tensor]:
    """Every tensor the model uses, in `dtype`, read in the order of the files."""
    infos = model.tensors.tensors
    in_file_order = sorted(infos, key=lambda name: (infos[name].path, infos[name].offset))
    total = sum(info.num_bytes for info in infos.values())
    read = 0
    weights: dict[str, Tensor] = {}
    with TensorReader() as reader:
        for name in in_file_order:
            weights[name] = _read_tensor(reader, infos[name], dtype)
            _check_finite(weights[name], infos[name])
            read += infos[name].num_bytes
            on_progress(read, total)
    return weights


def _read_tensor(reader: TensorReader, info: TensorInfo, dtype: torch.dtype) -> Tensor:
    """Read straight into the tensor that is kept; where the type differs, piece by piece through a small buffer."""
    weight = torch.empty(info.shape, dtype=dtype)
    stored_dtype = STORED_DTYPES[info.dtype]
    if stored_dtype == dtype:
        reader.read_tensor_into(info, _bytes_of(weight))
        return weight
    flat = weight.view(-1)
    piece = torch.empty(min(CONVERSION_ELEMENTS, flat.numel()), dtype=stored_dtype)
    for begin in range(0, flat.numel(), CONVERSION_ELEMENTS):
        part = piece[: min(CONVERSION_ELEMENTS, flat.numel() - begin)]
        reader.read_range_into(info, begin * part.itemsize, _bytes_of(part))
        flat[begin : begin + part.numel()] = part
    return weight


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor; numpy has no bfloat16, so it is seen as bytes."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _check_finite(weight: Tensor, info: TensorInfo) -> None:
    smallest, largest = torch.aminmax(weight)  # one pass, no temporary; NaN wins over every number
    if not (torch.isfinite(smallest) and torch.isfinite(largest)):
        raise CheckpointError(
            f"{info.name} in {info.path.name} holds NaN or infinity, expected finite weights; the file is damaged or "
            "was exported from a broken run: download or export it again"
        )


def _build(model: Model, weights: dict[str, Tensor]) -> Llama:
    """Arrange tensors under the names the forward pass uses."""
    config = model.config

    def linear(name: str) -> Linear:
        return Linear(weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(name: str) -> RMSNorm:
        return RMSNorm(weights[f"{name}.weight"], config.rms_norm_eps)

    def optional_norm(name: str) -> RMSNorm | None:
        return norm(name) if f"{name}.weight" in weights else None

    layers = tuple(
        Layer(
            input_layernorm=norm(f"{prefix}.input_layernorm"),
            q_proj=linear(f"{prefix}.self_attn.q_proj"),
            k_proj=linear(f"{prefix}.self_attn.k_proj"),
            v_proj=linear(f"{prefix}.self_attn.v_proj"),
            q_norm=optional_norm(f"{prefix}.self_attn.q_norm"),
            k_norm=optional_norm(f"{prefix}.self_attn.k_norm"),
            o_proj=linear(f"{prefix}.self_attn.o_proj"),
            post_attention_layernorm=norm(f"{prefix}.post_attention_layernorm"),
            gate_proj=linear(f"{prefix}.mlp.gate_proj"),
            up_proj=linear(f"{prefix}.mlp.up_proj"),
            down_proj=linear(f"{prefix}.mlp.down_proj"),
        )
        for prefix in (f"model.layers.{index}" for index in range(config.num_hidden_layers))
    )
    return Llama(
        config=config,
        embed_tokens=weights[EMBEDDING],
        layers=layers,
        norm=norm("model.norm"),
        lm_head=Linear(weights[model.tensors.head]),
        inverse_frequencies=torch.from_numpy(config.rope.inverse_frequencies(config.head_dim)),
    )
