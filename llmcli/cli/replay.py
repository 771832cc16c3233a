"""`llmcli replay`: generates the text of a receipt again and shows what differs.

A receipt is a stranger's file: the model and the adapters that it names are never downloaded.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import typer

from llmcli.checkpoint.hub_library import HubId, find_hub_id
from llmcli.cli import lazy, shared
from llmcli.cli.command import argument
from llmcli.cli.completion import complete_model
from llmcli.cli.constrained_texts import Schemas
from llmcli.cli.device_choice import RunnerOptions, start_device
from llmcli.cli.generate import show_all
from llmcli.cli.output.base import Output, TextOutput, begin_text
from llmcli.cli.output.tokens import show_piece
from llmcli.cli.progress import progress
from llmcli.cli.prompt import SamplerFlags
from llmcli.cli.run import LoadedRunner, Run
from llmcli.cli.session import EncodedPrompt, Session, open_session
from llmcli.cli.terminal import terminal
from llmcli.engine.request import Finished
from llmcli.errors import EXIT_INTERRUPTED, CheckpointError, DeviceError, DifferentTextError, TokenizerError, UsageError
from llmcli.resources import built_in_model
from llmcli.sampling.params import ResolvedSampling
from llmcli.timeline import Timeline


@dataclass(frozen=True)
class ReplayOptions:
    """A receipt, and what differs now."""

    file: Path = argument(..., "File written by `llmcli generate --receipt`.", metavar="RECEIPT")
    model: str | None = shared.model_option(
        None, "Where the model is now: folder or hub id.", "-m", show_default="the receipt's", complete=complete_model
    )
    adapter: list[str] | None = shared.adapter_option()
    device: str | None = shared.model_option(None, "cpu, cuda or cuda:N.", show_default="the receipt's")
    only: int | None = shared.sampling_option(
        None, "Replay only sample K.", min=1, max=2**32, metavar="K", show_default="all"
    )
    json: bool = shared.output_option(False, "Print one JSON object instead of text.")


def replay(*, options: ReplayOptions, messages: shared.MessageOptions) -> None:
    """Generate the text of a receipt again and show what differs.

    Differences of model, program, machine and prompt are named first.

    Exit code 6 if the text is another one.

    Examples

    llmcli replay story.json

    llmcli replay story.json -m path/to/model --only 3
    """
    loaded = lazy.receipt.load_receipt(options.file)
    receipt = _chosen(loaded.receipt, options)
    try:
        run, request = _prepare(receipt, options)
    except UsageError as error:
        raise UsageError(f"{options.file}: {error}") from error
    runner, now = _load(run, receipt, request)
    differences = lazy.receipt.compare_receipts(receipt, now)
    reason = "see above what else differs" if differences else "everything else in the receipt is the same"
    for difference in differences:
        terminal.warn(f"differs: {difference}")
    if not loaded.is_unchanged:
        reason = "the receipt was changed after it was written"
        terminal.warn(f"{options.file} was changed after it was written: its sha256 is not that of its content")
    elif not differences:
        terminal.info("Model, program and machine are as in the receipt")
    finished = _generate(run, runner, receipt, request, options)
    comparisons = lazy.receipt.compare_samples(receipt.samples, lazy.describe.describe_samples(finished))
    if options.json:
        terminal.write_json(_json(loaded.is_unchanged, differences, comparisons))
    _report(run.session, comparisons, reason)


def _chosen(receipt: lazy.receipt.Receipt, options: ReplayOptions) -> lazy.receipt.Receipt:
    """The receipt with the samples to generate again."""
    if options.only is None:
        return receipt
    samples = tuple(item for item in receipt.samples if item.sample == options.only)
    if not samples:
        numbers = ", ".join(str(item.sample) for item in receipt.samples[:20])
        raise UsageError(f"--only is {options.only}; {options.file} holds sample {numbers}")
    return replace(receipt, samples=samples)


def _prepare(receipt: lazy.receipt.Receipt, options: ReplayOptions) -> tuple[Run, lazy.request.Request]:
    """The run that a receipt describes, and the samples to generate.

    Raises: UsageError, CheckpointError, DeviceError.
    """
    sampler = lazy.describe.sampler_of(receipt)
    devices = _devices(receipt, options.device)
    name = _model_name(receipt, options)
    session = shared.with_adapters(open_session(name), _adapters(receipt, options))
    _check_fit(receipt, session)
    stopping = receipt.stopping
    run = Run(
        name=name,
        session=session,
        devices=devices,
        sampling=ResolvedSampling(sampler.params, {}),
        flags=SamplerFlags(),
        stop_strings=stopping.stop_strings,
        seed=sampler.seed,
        context=receipt.runner.context,
    )
    request = session.request(
        EncodedPrompt(receipt.prompt.text, receipt.prompt.token_ids, at_start=stopping.at_start),
        sampler,
        samples=tuple(item.sample - 1 for item in receipt.samples),
        max_new_tokens=stopping.max_new_tokens,
        stop_strings=stopping.stop_strings,
    )
    if receipt.schema is not None:
        grammar = lazy.grammar.Grammar(receipt.schema.name, receipt.schema.lark)
        request = Schemas(session).hold(request, grammar)
    return run, request


def _devices(receipt: lazy.receipt.Receipt, flag: str | None) -> RunnerOptions:
    """The receipt's device and precision. Another kind of device has its own usual precision.

    Raises: DeviceError for a card that cannot be used.
    """
    wanted = receipt.runner
    device = wanted.device if flag is None else flag
    start_device(device)
    try:
        options = RunnerOptions(device, "auto", None, wanted.kv_cache)
        if (options.card is None) != (wanted.device == "cpu"):
            return options
        return RunnerOptions(device, wanted.dtype, wanted.threads, wanted.kv_cache)
    except DeviceError as error:
        raise DeviceError(f"the receipt was made on {wanted.description}; {error}") from error


def _model_name(receipt: lazy.receipt.Receipt, options: ReplayOptions) -> str:
    """The model as `open_session` takes it: the given one, else the receipt's, if it is on this machine."""
    if options.model is not None:
        return options.model
    name, commit = receipt.model.name, receipt.model.commit
    remedy = "give its folder or hub id with --model"
    hub_id = find_hub_id(name)
    if commit is not None and hub_id is not None:
        pinned = HubId(hub_id.repo_id, commit)
        if lazy.hub.find_cached(pinned) is None:
            raise CheckpointError(
                f"{pinned} is not on this machine; download it with `llmcli pull {pinned}`, or {remedy}"
            )
        return str(pinned)
    if built_in_model(name) is None and (hub_id is not None or not os.path.exists(name)):
        raise CheckpointError(f"{options.file} was made with the model {name!r}, which is not here; {remedy}")
    return name


def _adapters(receipt: lazy.receipt.Receipt, options: ReplayOptions) -> Sequence[shared.AdapterChoice]:
    """The given adapters, else the receipt's, if they are on this machine."""
    if options.adapter:
        return shared.parse_adapters(options.adapter)
    choices = []
    for facts in receipt.model.adapters:
        name, hub_id = facts.name, find_hub_id(facts.name)
        if hub_id is not None and facts.commit is not None:
            hub_id = HubId(hub_id.repo_id, facts.commit)
            name = str(hub_id)
        is_here = os.path.exists(name) if hub_id is None else lazy.hub.find_cached_adapter(hub_id) is not None
        if not is_here:
            raise CheckpointError(
                f"{options.file} was made with the adapter {name!r}, which is not here; give adapters with --adapter"
            )
        choices.append(shared.AdapterChoice(name, facts.weight))
    return choices


def _check_fit(receipt: lazy.receipt.Receipt, session: Session) -> None:
    """Refuse a model that cannot be the receipt's. Raises: UsageError"""
    config, remedy = session.model.config, "give the receipt's model with --model"
    if receipt.runner.context > config.max_position_embeddings:
        raise UsageError(
            f"the context is {receipt.runner.context} tokens; {session.name} has a context limit of "
            f"{config.max_position_embeddings}; {remedy}"
        )
    sampling = receipt.sampling
    token_ids = [*receipt.prompt.token_ids, *(token_id for token_id, _ in sampling.logit_bias)]
    token_ids += [token_id for sequence, _ in sampling.sequence_bias for token_id in sequence]
    token_ids += [*sampling.begin_suppress_token_ids, *sampling.forced_eos_token_ids, *sampling.dry_breaker_token_ids]
    if (largest := max(token_ids)) >= config.vocab_size:
        raise UsageError(
            f"it names token {largest}, and {session.name} has tokens 0 to {config.vocab_size - 1}; {remedy}"
        )


def _load(
    run: Run, receipt: lazy.receipt.Receipt, request: lazy.request.Request
) -> tuple[LoadedRunner, lazy.receipt.Receipt]:
    """Read the weights and hash them at the same time; return the runner, and the receipt as it would be now."""
    session = run.session
    digests = lazy.describe.look_at_files(session.model, receipt.prompt)
    digests.start()
    loaded = run.load(len(request.samples))
    with progress(f"hashing {session.name}") as on_progress:
        files = digests.wait(on_progress)
    prompt, card = _encoded_again(session, receipt.prompt), run.devices.card
    now = lazy.describe.describe_run(
        run.model, session.model, loaded.runner, card, prompt, request, files, receipt.samples
    )
    return loaded, now


def _encoded_again(session: Session, prompt: lazy.receipt.PromptFacts) -> lazy.receipt.PromptFacts:
    """The prompt with its text's ids now; the receipt's ids are run."""
    try:
        if prompt.chat:
            encoded = session.encode_message(prompt.text, prompt.system, prompt.chat_template)
        else:
            encoded = session.encode_prompt(prompt.text)
    except (UsageError, TokenizerError) as error:
        terminal.warn(f"the prompt cannot be encoded again, so its token ids are not checked: {error}")
        return prompt
    return replace(prompt, token_ids=encoded.token_ids)


class _Collector(Output):
    """Keeps the texts."""

    def __init__(self) -> None:
        self.finished: list[Finished] = []

    def finish(self, finished: list[Finished]) -> None:
        """Keep them."""
        self.finished = finished


def _generate(
    run: Run, runner: LoadedRunner, receipt: lazy.receipt.Receipt, request: lazy.request.Request, options: ReplayOptions
) -> Sequence[Finished]:
    """The texts, shown as they come except with --json. Raises: typer.Exit after a Ctrl-C"""
    prompt = EncodedPrompt(receipt.prompt.text, receipt.prompt.token_ids, at_start=request.at_start)
    collector = _Collector()
    outputs: list[Output] = [collector]
    if not options.json:
        facts = run.facts(runner, receipt.prompt.text, prompt, request.samples, None, Timeline())
        outputs.append(TextOutput(facts))
        begin_text(facts, request.samples[0])
    if not show_all(lazy.scheduler.Generation(runner.runner, run.session.tokenizer, request), outputs):
        raise typer.Exit(EXIT_INTERRUPTED)
    return collector.finished


def _json(
    is_unchanged: bool,
    differences: Sequence[lazy.differences.Difference],
    comparisons: Sequence[lazy.receipt.SampleComparison],
) -> dict[str, object]:
    return {
        "is_same": all(item.is_same for item in comparisons),
        "receipt_is_unchanged": is_unchanged,
        "differences": [asdict(difference) for difference in differences],
        "samples": [
            {"is_same": item.is_same, "first_different_token": item.first, **asdict(item.now)} for item in comparisons
        ],
    }


def _report(session: Session, comparisons: Sequence[lazy.receipt.SampleComparison], reason: str) -> None:
    """Say that the texts are the same. Raises: DifferentTextError, whose message ends with the reason."""
    differing = [item for item in comparisons if not item.is_same]
    if differing:
        more = f"; {len(differing)} of {len(comparisons)} samples differ" if len(comparisons) > 1 else ""
        raise DifferentTextError(f"{_first_difference(session, differing[0])}{more}; {reason}")
    num_tokens = sum(len(item.now.token_ids) for item in comparisons)
    texts = "Same text" if len(comparisons) == 1 else f"Same {len(comparisons)} texts"
    terminal.info(f"{texts} as in the receipt ({num_tokens} tokens)")


def _first_difference(session: Session, item: lazy.receipt.SampleComparison) -> str:
    where = f"sample {item.now.sample}"
    if item.first is not None:
        then, now = (_shown_token(session, token_id) for token_id in item.tokens_at_first())
        return f"{where} differs from token {item.first + 1} on: {then} in the receipt, {now} now"
    if item.then.text != item.now.text:
        return f"{where} has the same tokens, and they decode to another text"
    return f"{where} has the same tokens, and ended with {item.then.finish_reason} then, {item.now.finish_reason} now"


def _shown_token(session: Session, token_id: int | None) -> str:
    if token_id is None:
        return "the end"
    is_known = token_id < session.tokenizer.vocab_size
    return f'{token_id} "{show_piece(session.tokenizer, token_id)}"' if is_known else str(token_id)
