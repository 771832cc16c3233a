"""What a user asks of an export, as a value; light, so that the command line can build it at once."""

from dataclasses import dataclass

from llmcli.quantization.schemes import WeightScheme

DEFAULT_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class ExportOptions:
    """The user's choices. `head_bits` None keeps the output head; `skip` are patterns of layers to keep."""

    scheme: WeightScheme
    head_bits: int | None = None
    skip: tuple[str, ...] = ()
    shard_bytes: int = DEFAULT_SHARD_BYTES
