"""A made-up receipt, for tests of its file and of comparisons."""

import math
from dataclasses import replace
from typing import Any

from llmcli.receipt.receipt import (
    FileFacts,
    ModelFacts,
    PromptFacts,
    Receipt,
    RunnerFacts,
    SampleFacts,
    SamplingFacts,
    StoppingFacts,
)
from llmcli.sampling.params import DEFAULT_ORDER, SamplingParams

RECEIPT = Receipt(
    model=ModelFacts(
        "org/name", "c" * 40, {"config.json": FileFacts(5, "a" * 64), "m.safetensors": FileFacts(9, "b" * 64)}
    ),
    program={"llmcli": "0.1.0", "torch": "2.11.0"},
    machine={"processor": "Some CPU", "instructions": "avx2 fma"},
    runner=RunnerFacts("CPU, float32, 2 threads", "cpu", "float32", "auto", 2, 64),
    prompt=PromptFacts("Grüße [\n1, 2 ]\n👩‍👩‍👧", True, "Be kind.", "plain", (1, 22, 333)),
    sampling=SamplingFacts(
        seed=2**64 - 1,
        parameters=dict(vars(SamplingParams(temperature=0.7, top_k=40))),
        order=DEFAULT_ORDER,
        ignore_eos=False,
        eos_token_ids=(2, 5),
        logit_bias=((3, -math.inf), (4, 1.5)),
        sequence_bias=(((7, 8), -1.0),),
        begin_suppress_token_ids=(6,),
        forced_eos_token_ids=(2,),
        dry_breaker_token_ids=(10, 11),
    ),
    stopping=StoppingFacts(20, ("THE END", "\n\n"), at_start=True),
    samples=(SampleFacts(1, (4, 5), "four", "eos"), SampleFacts(3, (4, 6, 7), "more\x1b[2J", "length")),
)


def changed(part: str, **values: Any) -> Receipt:
    """The receipt with other values in one of its parts."""
    changes: dict[str, Any] = {part: replace(getattr(RECEIPT, part), **values)}
    return replace(RECEIPT, **changes)
