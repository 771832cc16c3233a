"""Which tensors a LLaMA checkpoint holds under which names and shapes, and the check of a folder against that list."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llmcli.checkpoint.safetensors_file import TensorInfo, printable
from llmcli.config.llama import LlamaConfig
from llmcli.errors import CheckpointError, UnsupportedModelError

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
WEIGHT_DTYPES = ("BF16", "F16", "F32")

# Old converters stored this table per layer; it is recomputed from the config.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)

_MAX_NAMED = 4  # tensors named in one message; the rest are counted


@dataclass(frozen=True)
class ExpectedTensor:
    """A tensor the model needs: its name, its shape, and the config fields the shape comes from."""

    name: str
    shape: tuple[int, ...]
    reason: str


def expected_tensors(config: LlamaConfig) -> Iterator[ExpectedTensor]:
    """Every tensor of the model but the output head, in the order in which a token passes them.

    Shapes: linear weights are [output_size, input_size], as Hugging Face stores them.
    """
    hidden = ("hidden_size", config.hidden_size)
    intermediate = ("intermediate_size", config.intermediate_size)
    query = (f"num_attention_heads {config.num_attention_heads} * head_dim {config.head_dim}", config.q_size)
    key_value = (f"num_key_value_heads {config.num_key_value_heads} * head_dim {config.head_dim}", config.kv_size)

    def tensor(name: str, *sizes: tuple[str, int]) -> ExpectedTensor:
        return ExpectedTensor(name, tuple(size for _, size in sizes), ", ".join(reason for reason, _ in sizes))

    def linear(name: str, output: tuple[str, int], input_: tuple[str, int], has_bias: bool) -> Iterator[ExpectedTensor]:
        yield tensor(f"{name}.weight", output, input_)
        if has_bias:
            yield tensor(f"{name}.bias", output)

    traits = config.traits
    yield tensor(EMBEDDING, ("vocab_size", config.vocab_size), hidden)
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        yield tensor(f"{layer}.input_layernorm.weight", hidden)
        yield from linear(f"{layer}.self_attn.q_proj", query, hidden, traits.qkv_bias)
        yield from linear(f"{layer}.self_attn.k_proj", key_value, hidden, traits.qkv_bias)
        yield from linear(f"{layer}.self_attn.v_proj", key_value, hidden, traits.qkv_bias)
        if traits.qk_norm:
            yield tensor(f"{layer}.self_attn.q_norm.weight", ("head_dim", config.head_dim))
            yield tensor(f"{layer}.self_attn.k_norm.weight", ("head_dim", config.head_dim))
        yield from linear(f"{layer}.self_attn.o_proj", hidden, query, traits.o_bias)
        yield tensor(f"{layer}.post_attention_layernorm.weight", hidden)
        yield from linear(f"{layer}.mlp.gate_proj", intermediate, hidden, traits.mlp_bias)
        yield from linear(f"{layer}.mlp.up_proj", intermediate, hidden, traits.mlp_bias)
        yield from linear(f"{layer}.mlp.down_proj", hidden, intermediate, traits.mlp_bias)
    yield tensor("model.norm.weight", hidden)


@dataclass(frozen=True)
class ModelTensors:
    """The tensors of one model, matched by name: `tensors` holds what the model uses, `unused` the names it does not.

    `head` names the output head's weight: the embedding's own name where the two share one tensor.
    """

    tensors: Mapping[str, TensorInfo]
    head: str
    unused: tuple[str, ...]


def match_tensors(config: LlamaConfig, tensors: Mapping[str, TensorInfo], where: str) -> ModelTensors:
    """Match a folder's tensors with what the config asks for, before anything is read.

    The stored tensors decide about the head, then the config, as in Hugging Face's tie_weights: an lm_head.weight
    that is there is used; without one, tie_word_embeddings shares the embedding. A tied model may also store its one
    matrix as lm_head.weight only.
    Raises: CheckpointError naming missing or misshapen tensors; UnsupportedModelError for a dtype that is no weight.
    """
    expected = list(expected_tensors(config))
    embedding = expected[0]
    if config.tie_word_embeddings and HEAD in tensors and embedding.name not in tensors:
        tensors = {**tensors, embedding.name: tensors[HEAD]}
    is_shared = config.tie_word_embeddings and tensors.get(HEAD) in (None, tensors.get(embedding.name))
    if not is_shared:
        expected.append(ExpectedTensor(HEAD, embedding.shape, embedding.reason))

    missing = [tensor.name for tensor in expected if tensor.name not in tensors]
    if missing == [HEAD]:
        raise CheckpointError(
            f"{where}: {HEAD} is missing and config.json does not set tie_word_embeddings; "
            "if the head shares the embedding, set tie_word_embeddings to true there"
        )
    if missing:
        raise CheckpointError(
            f"{where}: {len(missing)} of {len(expected)} tensors are missing: {_named(missing)}; incomplete download, "
            "or config.json of another model?"
        )
    for tensor in expected:
        info = tensors[tensor.name]
        if info.shape != tensor.shape:
            raise CheckpointError(
                f"{tensor.name} in {info.path.name} is {list(info.shape)}, expected {list(tensor.shape)} "
                f"({tensor.reason} in config.json)"
            )
        if info.dtype not in WEIGHT_DTYPES:
            raise UnsupportedModelError(
                f"{tensor.name} in {info.path.name} is {info.dtype}, expected one of {', '.join(WEIGHT_DTYPES)}"
            )
    used = {tensor.name: tensors[tensor.name] for tensor in expected}
    seen = set(used.values())  # by place, since a tied matrix may stand under another name
    names = sorted(name for name, info in tensors.items() if info not in seen)
    unused = tuple(printable(name) for name in names if not name.endswith(_IGNORED_SUFFIXES))
    return ModelTensors(tensors=used, head=embedding.name if is_shared else HEAD, unused=unused)


def _named(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMED])
    return shown if len(names) <= _MAX_NAMED else f"{shown} and {len(names) - _MAX_NAMED} more"
