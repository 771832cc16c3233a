"""From a run to its receipt, and from a receipt to the sampler that it describes.

A receipt has token ids and resolved settings, not flags. So a default, a preset or a generation_config.json that has
changed since is named when it is replayed, and changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.errors import UsageError
from llmcli.reading import CHAT_TEMPLATE
from llmcli.receipt.digests import FileDigests
from llmcli.receipt.machine import describe_machine, describe_program
from llmcli.receipt.model_files import commit_of, model_files
from llmcli.receipt.receipt import (
    AdapterFacts,
    FileFacts,
    ModelFacts,
    PromptFacts,
    Receipt,
    RunnerFacts,
    SampleFacts,
    SamplingFacts,
    SchemaFacts,
    StoppingFacts,
)
from llmcli.sampling.params import SPECS, SamplingParams
from llmcli.sampling.sampler import Sampler

if TYPE_CHECKING:
    from llmcli.checkpoint.model import Model
    from llmcli.engine.events import Finished
    from llmcli.engine.request import Request
    from llmcli.runners.base import Runner

TEMPLATE_FILE = "--chat-template"  # the name of such a file among those of the model


def look_at_files(model: Model, prompt: PromptFacts) -> FileDigests:
    """The files that a text depends on, as they are now; to be called before the weights are read.

    Raises: CheckpointError.
    """
    choice = prompt.chat_template
    files = model_files(model, with_template=prompt.chat and choice is None)
    # `plain` is not a file, and what is too long is not a template.
    if choice is not None and os.path.isfile(choice) and os.path.getsize(choice) <= CHAT_TEMPLATE.max_bytes:
        files[TEMPLATE_FILE] = Path(choice)
    return FileDigests(files)


def describe_run(
    name: str,
    model: Model,
    runner: Runner,
    card: int | None,
    prompt: PromptFacts,
    request: Request,
    files: Mapping[str, FileFacts],
    samples: tuple[SampleFacts, ...],
) -> Receipt:
    """The receipt of a run of `model`, whose name on the command line is `name`, on a card or, without one, the CPU."""
    arithmetic = runner.arithmetic
    text_libraries = ["tokenizers" if "tokenizer.json" in files else "sentencepiece"]
    if prompt.chat:
        text_libraries.append("jinja2")
    schema = None
    if request.schema is not None:
        text_libraries.append("llguidance")
        schema = SchemaFacts(request.schema.grammar.name, request.schema.grammar.lark)
    return Receipt(
        model=ModelFacts(name, commit_of(model.checkpoint.folder), files, _adapters(model)),
        program=describe_program(arithmetic, text_libraries),
        machine=describe_machine(card),
        runner=RunnerFacts(
            description=runner.description,
            device="cpu" if card is None else f"cuda:{card}",
            dtype=arithmetic.dtype,
            kv_cache=arithmetic.kv_cache,
            threads=arithmetic.num_threads,
            context=runner.limits.max_seq_len,
        ),
        prompt=prompt,
        sampling=_sampling(request.sampler),
        stopping=StoppingFacts(request.max_new_tokens, request.stop_strings, request.at_start),
        samples=samples,
        schema=schema,
    )


def describe_samples(finished: Sequence[Finished]) -> tuple[SampleFacts, ...]:
    """The texts that came to their end."""
    return tuple(
        SampleFacts(item.sample + 1, item.token_ids, item.text, item.finish_reason)
        for item in finished
        if item.finish_reason != "interrupted"
    )


def sampler_of(receipt: Receipt) -> Sampler:
    """The sampler that a receipt describes.

    Raises: UsageError for parameters, an order or biases that no sampler has.
    """
    sampling = receipt.sampling
    return Sampler(
        _params(sampling.parameters),
        seed=sampling.seed,
        num_prompt_tokens=len(receipt.prompt.token_ids),
        eos_token_ids=frozenset(sampling.eos_token_ids),
        ignore_eos=sampling.ignore_eos,
        logit_bias=dict(sampling.logit_bias),
        sequence_bias=sampling.sequence_bias,
        begin_suppress_token_ids=frozenset(sampling.begin_suppress_token_ids),
        forced_eos_token_ids=frozenset(sampling.forced_eos_token_ids),
        dry_breaker_token_ids=frozenset(sampling.dry_breaker_token_ids),
        order=sampling.order,
    )


def _adapters(model: Model) -> tuple[AdapterFacts, ...]:
    return tuple(AdapterFacts(one.name, commit_of(one.folder), one.weight) for one in model.adapters)


def _params(parameters: Mapping[str, float]) -> SamplingParams:
    if odd := sorted(parameters.keys() ^ SPECS.keys()):
        what = "unknown" if odd[0] in parameters else "missing"
        raise UsageError(f"sampling.parameters.{odd[0]:.60} is {what}, expected {', '.join(SPECS)}")
    values: dict[str, Any] = dict(parameters)
    return SamplingParams(**values)


def _sampling(sampler: Sampler) -> SamplingFacts:
    return SamplingFacts(
        seed=sampler.seed,
        parameters=dict(vars(sampler.params)),
        order=sampler.order,
        ignore_eos=sampler.ignore_eos,
        eos_token_ids=tuple(sorted(sampler.eos_token_ids)),
        logit_bias=tuple(sorted(sampler.logit_bias.items())),
        sequence_bias=sampler.sequence_bias,
        begin_suppress_token_ids=tuple(sorted(sampler.begin_suppress_token_ids)),
        forced_eos_token_ids=tuple(sorted(sampler.forced_eos_token_ids)),
        dry_breaker_token_ids=tuple(sorted(sampler.dry_breaker_token_ids)),
    )
