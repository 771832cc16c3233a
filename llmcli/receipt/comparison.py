"""How a run differs from a receipt: what the text depends on, and the text."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llmcli.differences import Difference, find_differences, first_difference
from llmcli.receipt.codec import to_json
from llmcli.receipt.receipt import Receipt, SampleFacts


@dataclass(frozen=True)
class SampleComparison:
    """A sample of a receipt and the same sample now. `first` is the index of the first token that differs, None if
    all are the same; one text may be the beginning of the other.
    """

    then: SampleFacts
    now: SampleFacts
    first: int | None

    @property
    def is_same(self) -> bool:
        """Whether tokens, text and end are the same."""
        return self.then == self.now

    def tokens_at_first(self) -> tuple[int | None, int | None]:
        """The first tokens that differ, then and now; None where a text has ended."""
        assert self.first is not None
        then, now = (ids[self.first : self.first + 1] for ids in (self.then.token_ids, self.now.token_ids))
        return (then[0] if then else None, now[0] if now else None)


def compare_receipts(then: Receipt, now: Receipt) -> list[Difference]:
    """What differs of all that a text depends on; files and versions are compared, names of models are not."""
    return find_differences(_settings(then), _settings(now))


def compare_samples(then: Iterable[SampleFacts], now: Iterable[SampleFacts]) -> list[SampleComparison]:
    """The samples that are in both, in the order of their numbers."""
    found = {item.sample: item for item in now}
    pairs = [(item, found[item.sample]) for item in sorted(then, key=lambda item: item.sample) if item.sample in found]
    return [SampleComparison(old, new, _first_token(old, new)) for old, new in pairs]


def _first_token(then: SampleFacts, now: SampleFacts) -> int | None:
    return None if then.token_ids == now.token_ids else first_difference(then.token_ids, now.token_ids)


def _settings(receipt: Receipt) -> dict[str, Any]:
    """Everything but the model's name and the texts, by a name for people."""
    return {
        "commit": receipt.model.commit,
        **{
            f"adapter {number}": f"commit {adapter.commit}, weight {adapter.weight:g}"
            for number, adapter in enumerate(receipt.model.adapters, 1)
        },
        **{f"file {name}": f"sha256 {facts.sha256}" for name, facts in receipt.model.files.items()},
        **receipt.program,
        **receipt.machine,
        **_flat("runner ", to_json(receipt.runner)),
        **_flat("prompt ", to_json(receipt.prompt)),
        **_flat("", to_json(receipt.sampling)),
        **_flat("", to_json(receipt.stopping)),
        "schema": None if receipt.schema is None else receipt.schema.lark,
    }


def _flat(prefix: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= value
        else:
            flat[f"{prefix}{name}"] = value
    return flat
