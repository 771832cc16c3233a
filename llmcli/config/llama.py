"""`LlamaConfig`: everything about a model's shape, read from a Hugging Face config.json and checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmcli.config.families import Traits, family_of
from llmcli.config.fields import Fields, shown
from llmcli.config.rope import RopeParameters, read_rope_parameters
from llmcli.errors import CheckpointError, UnsupportedModelError
from llmcli.reading import check_value

# Far beyond any model: a damaged number shall neither fill the memory with names of tensors, nor give a matrix more
# bytes than 64 bits count.
MAX_LAYERS = 10_000
MAX_WIDTH = 2**24


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a LLaMA-like model, under Hugging Face's names; `traits` is what its family adds."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeParameters
    tie_word_embeddings: bool
    traits: Traits
    bos_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    notes: tuple[str, ...]  # what a user should know about settings that contradict each other, one line each

    @property
    def q_size(self) -> int:
        """Width of the query projection: num_attention_heads * head_dim."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the key and of the value projection: num_key_value_heads * head_dim."""
        return self.num_key_value_heads * self.head_dim

    def kv_cache_bytes(self, num_tokens: int, itemsize: int, scale_bytes: int = 0) -> int:
        """Bytes of K and V for `num_tokens` positions of one row in elements of `itemsize` bytes.

        `scale_bytes` are those of the scale that a head's vector has beside its elements.
        """
        head_bytes = self.head_dim * itemsize + scale_bytes
        return 2 * self.num_hidden_layers * self.num_key_value_heads * num_tokens * head_bytes

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], where: str) -> "LlamaConfig":
        """The model's shape from a config.json object; `where` names the file in messages.

        Raises: UnsupportedModelError for another architecture, activation or rotary type; CheckpointError for
                missing or impossible values.
        """
        try:
            check_value(config)
        except ValueError as error:
            raise CheckpointError(f"{where}: {error}") from error
        family = family_of(config, where)
        fields = Fields(family.complete(config), where)
        _refuse_other_forward_passes(fields)
        hidden_size = fields.positive_int("hidden_size", at_most=MAX_WIDTH)
        num_attention_heads = fields.positive_int("num_attention_heads", at_most=MAX_WIDTH)
        num_key_value_heads = fields.positive_int("num_key_value_heads", num_attention_heads)
        num_hidden_layers = fields.positive_int("num_hidden_layers", at_most=MAX_LAYERS)
        return cls(
            model_type=fields.string("model_type"),
            vocab_size=fields.positive_int("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.positive_int("intermediate_size", at_most=MAX_WIDTH),
            num_hidden_layers=num_hidden_layers,
            num_attention_heads=num_attention_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=_head_dim(fields, hidden_size, num_attention_heads, num_key_value_heads),
            rms_norm_eps=fields.positive_float("rms_norm_eps", 1e-6),
            max_position_embeddings=fields.positive_int("max_position_embeddings", 2048),
            rope=read_rope_parameters(fields),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            traits=family.read_traits(fields, num_hidden_layers),
            bos_token_ids=fields.token_ids("bos_token_id"),
            eos_token_ids=fields.token_ids("eos_token_id"),
            notes=tuple(fields.notes),
        )


def _refuse_other_forward_passes(fields: Fields) -> None:
    """What transformers reads for every family, and this program computes for none."""
    if (activation := fields.string("hidden_act", "silu")) != "silu":
        raise UnsupportedModelError(f"{fields.where}: hidden_act {shown(activation)} is not supported, expected 'silu'")
    if fields.values.get("is_causal", True) is not True:  # transformers takes null for false
        raise UnsupportedModelError(f"{fields.where}: is_causal other than true is not supported")
    if not fields.is_null("per_layer_config"):
        raise UnsupportedModelError(f"{fields.where}: per_layer_config is not supported")


def _head_dim(fields: Fields, hidden_size: int, num_attention_heads: int, num_key_value_heads: int) -> int:
    if "head_dim" not in fields.values and hidden_size % num_attention_heads:
        raise UnsupportedModelError(
            f"{fields.where}: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_attention_heads}"
        )
    head_dim = fields.positive_int("head_dim", hidden_size // num_attention_heads)
    if head_dim % 2:
        raise CheckpointError(f"{fields.where}: head_dim {head_dim} is odd, rotary embedding needs pairs")
    if num_attention_heads % num_key_value_heads:
        raise CheckpointError(
            f"{fields.where}: num_attention_heads {num_attention_heads} is not a multiple of "
            f"num_key_value_heads {num_key_value_heads}"
        )
    if num_attention_heads * head_dim > MAX_WIDTH:
        raise CheckpointError(
            f"{fields.where}: num_attention_heads {num_attention_heads} * head_dim {head_dim} is over {MAX_WIDTH}"
        )
    return head_dim
