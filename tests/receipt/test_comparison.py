"""Each difference between two receipts is named."""

from dataclasses import replace

import pytest
from receipt.some_receipt import RECEIPT, changed

from llmcli.differences import Difference, find_differences
from llmcli.receipt.receipt import FileFacts, Receipt, SampleFacts, compare_receipts, compare_samples

FILES = RECEIPT.model.files


@pytest.mark.parametrize(
    ("now", "name"),
    [
        (changed("model", commit="d" * 40), "commit"),
        (changed("model", files={**FILES, "m.safetensors": FileFacts(9, "e" * 64)}), "file m.safetensors"),
        (changed("model", files={"config.json": FILES["config.json"]}), "file m.safetensors"),
        (changed("model", files={**FILES, "added_tokens.json": FileFacts(2, "e" * 64)}), "file added_tokens.json"),
        (replace(RECEIPT, program={**RECEIPT.program, "torch": "2.12.0"}), "torch"),
        (replace(RECEIPT, program={**RECEIPT.program, "llmcli": "0.2.0"}), "llmcli"),
        (replace(RECEIPT, machine={**RECEIPT.machine, "instructions": "avx2"}), "instructions"),
        (replace(RECEIPT, machine={**RECEIPT.machine, "variable MKL_CBWR": "AVX2"}), "variable MKL_CBWR"),
        (changed("runner", threads=3), "runner threads"),
        (changed("runner", dtype="bfloat16"), "runner dtype"),
        (changed("runner", description="CPU"), "runner description"),
        (changed("runner", context=65), "runner context"),
        (changed("prompt", text="Gruß"), "prompt text"),
        (changed("prompt", system=None), "prompt system"),
        (changed("prompt", token_ids=(1, 22)), "prompt token_ids"),
        (changed("sampling", seed=1), "seed"),
        (changed("sampling", parameters={**RECEIPT.sampling.parameters, "top_k": 41}), "top_k"),
        (changed("sampling", order=("top_k", "temperature")), "order"),
        (changed("sampling", logit_bias=()), "logit_bias"),
        (changed("stopping", max_new_tokens=None), "max_new_tokens"),
        (changed("stopping", stop_strings=()), "stop_strings"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_single_change_is_named_and_nothing_else(now: Receipt, name: str) -> None:
    assert [difference.name for difference in compare_receipts(RECEIPT, now)] == [name]


def test_the_texts_and_the_model_s_name_are_no_difference() -> None:
    assert compare_receipts(RECEIPT, changed("model", name="elsewhere")) == []
    assert compare_receipts(RECEIPT, replace(RECEIPT, samples=RECEIPT.samples[:1])) == []


def test_the_first_token_that_differs() -> None:
    def sample(*token_ids: int) -> SampleFacts:
        return SampleFacts(1, token_ids, "".join(map(str, token_ids)), "length")

    for then, now, first, tokens in (
        (sample(1, 2, 3), sample(1, 5, 3), 1, (2, 5)),
        (sample(1, 2), sample(1, 2, 3), 2, (None, 3)),
        (sample(1, 2, 3), sample(1, 2), 2, (3, None)),
    ):
        (found,) = compare_samples([then], [now])
        assert not found.is_same
        assert (found.first, found.tokens_at_first()) == (first, tokens)
    (found,) = compare_samples([sample(1)], [sample(1)])
    assert found.is_same
    assert found.first is None


@pytest.mark.parametrize("values", [{"text": "other"}, {"finish_reason": "stop"}])
def test_equal_tokens_are_not_all(values: dict[str, str]) -> None:
    (then, _) = RECEIPT.samples
    (found,) = compare_samples([then], [replace(then, **values)])
    assert not found.is_same
    assert found.first is None


def test_samples_are_found_by_their_numbers() -> None:
    first, third = RECEIPT.samples
    assert [item.now for item in compare_samples([third, first], [third])] == [third]
    assert [item.now for item in compare_samples([third, first], [third, first])] == [first, third]


def test_differences_in_words() -> None:
    (short,) = find_differences({"a": 1, "b": "x"}, {"a": 1, "b": "y"})
    assert str(short) == "b 'x', now 'y'"
    assert str(Difference("stop", ["a"], None)) == "stop ['a'], now unset"
    many = Difference("ids", list(range(10)), [0, 1, 2, *range(4, 12)])
    assert str(many) == "ids has 10 entries, now 11; they differ from entry 4 on"
