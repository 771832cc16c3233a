"""Which forms of output the flags ask for; and `--receipt FILE`, what the text depended on, for `llmcli replay`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.cli import lazy
from llmcli.cli.options import output_option
from llmcli.cli.output.base import JsonLinesOutput, JsonOutput, Output, RunFacts, StartOutput, StatsOutput, TextOutput
from llmcli.cli.output.page import FindRoads, HtmlOutput
from llmcli.cli.output.page_kit import PAGE
from llmcli.cli.output.tokens import ColorOutput, WhyOutput, why_no_color
from llmcli.cli.progress import progress
from llmcli.cli.terminal import terminal
from llmcli.engine.request import Event, Finished
from llmcli.errors import UsageError

if TYPE_CHECKING:
    from llmcli.cli.run import Run
    from llmcli.engine.request import Request
    from llmcli.receipt.receipt import PromptFacts
    from llmcli.runners.base import Runner

# Tokens listed for each choice: as many as fit on a terminal's line, and on the page.
WHY_ALTERNATIVES = 5
HTML_ALTERNATIVES = 10


class ReceiptOutput:
    """Notes the state of the model's files when made, hashes them while the text comes, and writes at the end.

    Raises: CheckpointError for a file that is gone.
    """

    def __init__(self, path: Path, run: Run, prompt: PromptFacts, *, replace: bool):
        self._path = path
        self._replace = replace
        self._run = run
        self._prompt = prompt
        self._digests = lazy.look_at_files(run.session.model, prompt)

    def begin(self, runner: Runner, request: Request) -> ReceiptOutput:
        """Start hashing the weights, which are read by now, so that it does not delay the first token."""
        self._runner, self._request = runner, request
        self._digests.start()
        return self

    def show(self, event: Event) -> None:
        """Nothing is written before the end."""

    def finish(self, finished: list[Finished]) -> None:
        """Write the receipt of a finished run.

        Raises: CheckpointError if a file of the model has changed; OutputError, UsageError if it cannot be written.
        """
        if len(finished) < len(self._request.samples) or any(item.finish_reason == "interrupted" for item in finished):
            self._digests.stop()
            terminal.info("no receipt: the run was interrupted")
            return
        run = self._run
        with progress(f"hashing {run.session.name}") as on_progress:
            files = self._digests.wait(on_progress)
        receipt = lazy.describe_run(
            run.model,
            run.session.model,
            self._runner,
            run.devices.card,
            self._prompt,
            self._request,
            files,
            lazy.describe_samples(finished),
        )
        lazy.save_receipt(self._path, receipt, replace=self._replace)
        terminal.info(f"receipt: {self._path}")


@dataclass(frozen=True)
class OutputOptions:
    """The output flags, checked against each other.

    Raises: UsageError for flags that exclude each other, or a page that cannot be written.
    """

    json: bool = output_option(False, "Print one JSON object instead of text.")
    jsonl: bool = output_option(False, "Print one JSON object for each token.", hidden=True)
    logprobs: int | None = output_option(
        None,
        "With --json or --jsonl: add the log-probability of each token and of the K likeliest.",
        min=0,
        max=100,
        metavar="K",
        hidden=True,
    )
    color: str | None = output_option(None, "Color each token by its probability.", metavar="prob", words=("prob",))
    why: bool = output_option(False, "Show what each sampling step removed, for each token.")
    html: Path | None = output_option(None, "Save probabilities and sampling steps as an HTML page.")
    receipt: Path | None = output_option(None, "Save all that the text depends on, for `llmcli replay`.")
    force: bool = output_option(False, "Replace an older page of --html or receipt of --receipt.", hidden=True)
    roads: int | None = output_option(
        None, "Show on the --html page where the N likeliest tokens that were not drawn would have led.", min=1, max=100
    )
    stats: str | None = output_option(
        None,
        "Print times, rates and settings; with start: how long each part of the start took.",
        metavar="[start]",
        words=("start",),
    )

    def __post_init__(self) -> None:
        """Refuse what cannot be shown together."""
        if self.json and self.jsonl:
            raise UsageError("--json and --jsonl cannot be combined")
        if self.logprobs is not None and self.shows_text:
            raise UsageError("--logprobs needs --json or --jsonl; --why and --html FILE show probabilities too")
        if self.color not in (None, "prob"):
            raise UsageError(f"--color is {self.color!r}, expected prob")
        if self.color is not None and not self.shows_text:
            raise UsageError("--color cannot be combined with --json or --jsonl")
        if self.stats not in (None, "run", "start"):
            raise UsageError(f"--stats is {self.stats!r}, expected no value, or start")
        if self.force and self.html is None and self.receipt is None:
            raise UsageError("--force needs --html FILE or --receipt FILE")
        if self.roads is not None and self.html is None:
            raise UsageError("--roads needs --html FILE")
        # Before minutes of work.
        if self.html is not None:
            PAGE.check(self.html, replace=self.force)
        if self.receipt is not None:
            if self.html is not None and self.receipt.absolute() == self.html.absolute():
                raise UsageError(f"--html and --receipt are both {self.receipt}; name two files")
            lazy.RECEIPT_FILE.check(self.receipt, replace=self.force)

    @property
    def shows_text(self) -> bool:
        """Whether the text itself goes to stdout."""
        return not (self.json or self.jsonl)

    @property
    def num_alternatives(self) -> int | None:
        """How many other tokens the engine has to report for each choice, or None if no output shows them."""
        wanted = [self.logprobs] if self.logprobs is not None else []
        wanted += [WHY_ALTERNATIVES] if self.why else []
        wanted += [HTML_ALTERNATIVES] if self.html is not None else []
        wanted += [0] if self.color else []
        return max(wanted, default=None)


def open_outputs(options: OutputOptions, facts: RunFacts, find_roads: FindRoads = lambda texts: ()) -> list[Output]:
    """The outputs the flags ask for: those for stdout first; the page last, since its roads take a while.

    Raises: UsageError if the page of --html cannot be written.
    """
    outputs: list[Output] = [_main_output(options, facts)]
    if options.why:
        outputs.append(WhyOutput(facts))
    if options.stats == "run":
        outputs.append(StatsOutput(facts))
    if facts.timeline is not None:
        outputs.append(StartOutput(facts.timeline))
    if options.html is not None:
        outputs.append(HtmlOutput(facts, options.html, replace=options.force, find_roads=find_roads))
    return outputs


def _main_output(options: OutputOptions, facts: RunFacts) -> Output:
    if options.json:
        return JsonOutput(facts, with_logprobs=options.logprobs is not None)
    if options.jsonl:
        return JsonLinesOutput(facts)
    if options.color and (reason := why_no_color()):
        terminal.info(reason)
    elif options.color:
        return ColorOutput(facts)
    return TextOutput(facts)
