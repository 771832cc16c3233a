"""`LlamaConfig`: everything about a model's shape, read from a Hugging Face config.json and checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmcli.config.families import Traits, family_of
from llmcli.config.fields import Fields
from llmcli.config.rope import RopeParameters, read_rope_parameters
from llmcli.errors import CheckpointError, UnsupportedModelError

MAX_LAYERS = 10_000  # far beyond any model, so that a damaged number does not fill the memory with names


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
        family = family_of(config, where)
        config = {**family.defaults, **config}
        fields = Fields(config, where)
        if (activation := fields.string("hidden_act", "silu")) != "silu":
            raise UnsupportedModelError(f"{where}: hidden_act {activation!r} is not supported, expected 'silu'")
        hidden_size = fields.positive_int("hidden_size")
        num_attention_heads = fields.positive_int("num_attention_heads")
        num_key_value_heads = fields.positive_int("num_key_value_heads", num_attention_heads)
        num_hidden_layers = fields.positive_int("num_hidden_layers")
        if num_hidden_layers > MAX_LAYERS:
            raise CheckpointError(f"{where}: num_hidden_layers is {num_hidden_layers}, expected at most {MAX_LAYERS}")
        if config.get("head_dim") is None and hidden_size % num_attention_heads:
            raise CheckpointError(
                f"{where}: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_attention_heads}"
            )
        head_dim = fields.positive_int("head_dim", hidden_size // num_attention_heads)
        if head_dim % 2:
            raise CheckpointError(f"{where}: head_dim {head_dim} is odd, rotary embedding needs pairs")
        if num_attention_heads % num_key_value_heads:
            raise CheckpointError(
                f"{where}: num_attention_heads {num_attention_heads} is not a multiple of "
                f"num_key_value_heads {num_key_value_heads}"
            )
        return cls(
            model_type=fields.string("model_type"),
            vocab_size=fields.positive_int("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.positive_int("intermediate_size"),
            num_hidden_layers=num_hidden_layers,
            num_attention_heads=num_attention_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.positive_float("rms_norm_eps", 1e-6),
            max_position_embeddings=fields.positive_int("max_position_embeddings", 2048),
            rope=read_rope_parameters(config, where),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            traits=family.read_traits(fields, num_hidden_layers),
            bos_token_ids=fields.token_ids("bos_token_id"),
            eos_token_ids=fields.token_ids("eos_token_id"),
        )
