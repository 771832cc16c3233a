"""`llmcli.load`: a model for notebooks and programs, with the engine, the options and the defaults of the commands.

What a call asks for is a line of a batch, and becomes a request as one does: the same seed gives the text of
`llmcli generate` and `llmcli batch`. Messages of errors name the options of the commands.
"""

from __future__ import annotations

import gc
import math
import os
import secrets
import warnings
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict, Unpack, overload

from llmcli.batch.input import integer_of, line_of, seed_of
from llmcli.cli import lazy, shared
from llmcli.cli.lines import Lines, Task
from llmcli.cli.output.notebook import text_html
from llmcli.cli.run import LoadedRunner, check_run, loaded_objects_set_aside, open_run
from llmcli.cli.settings import find_alias
from llmcli.cli.terminal import terminal
from llmcli.engine.request import Event, Failed, Finished, FinishReason, PromptScored, Request, Timings, Token
from llmcli.errors import LLMCliError, TokenizerError, UsageError
from llmcli.openai_body import message_of, text_of
from llmcli.tokenizer.base import Tokenizer, decode

Asked = tuple[Request, Task]
Prompt = str | list[dict[str, Any]]  # a text, or messages with `role` and `content` in each


class Options(TypedDict, total=False):
    """What a call may ask, as a line of a batch; None or nothing is the default of `llmcli generate`.

    `schema` is a JSON Schema, `grammar` one in Lark or GBNF. `chat_template_kwargs` are variables of the chat template,
    for messages, such as `{"enable_thinking": False}`; `tools` and the two keys after it are OpenAI's. Without a `seed`
    each call draws one. `logprobs` is true, for a batch false; without log-probabilities texts come faster.
    """

    logprobs: bool
    seed: int | None
    max_new_tokens: int | None
    stop: str | list[str] | None
    schema: dict[str, Any] | bool | None
    json_output: bool | None
    regex: str | None
    choice: list[str] | None
    grammar: str | None
    chat_template_kwargs: dict[str, Any] | None
    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    parallel_tool_calls: bool | None
    temperature: float | None
    dynatemp_range: float | None
    dynatemp_exponent: float | None
    top_n_sigma: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    xtc_probability: float | None
    xtc_threshold: float | None
    mirostat_tau: float | None
    mirostat_eta: float | None
    encoder_repetition_penalty: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    penalty_window: int | None
    dry_multiplier: float | None
    dry_base: float | None
    dry_allowed_length: int | None
    dry_window: int | None
    min_new_tokens: int | None


@dataclass(frozen=True)
class Text:
    """A text in the model's eyes; `str` gives the text alone, and a notebook shows each token in its tint.

    `logprobs` has the model's own log-probability of each token in `token_ids`, before any sampling step; () if none
    were asked for. `prompt_token_ids` are what the tokens followed.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_token_ids: tuple[int, ...]
    tokenizer: Tokenizer = field(repr=False, compare=False)

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return text_html(self.tokenizer, self.text, self.token_ids, self.logprobs)


@dataclass(frozen=True)
class GeneratedText(Text):
    """A text that was generated.

    `token_ids` end with the end-of-text token or those of a stop string, which `text` leaves out. `sample` is its
    index among the samples of `seed`. With a schema `is_complete` says whether it allows the text to end here; else it
    is None. `message` is the answer in OpenAI's form, to be appended to the messages: with `reasoning_content` and
    `tool_calls`, if it has any. In a batch a text may fail while it runs: then `finish_reason` is "failed", `error`
    says why, `text` has what came before, and `timings` are zeros. Units: `timings` seconds
    """

    seed: int
    sample: int
    finish_reason: FinishReason | Literal["failed"]
    is_complete: bool | None
    timings: Timings = field(compare=False)
    message: dict[str, Any]
    error: LLMCliError | None = field(default=None, compare=False)

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls of the answer, [] if there are none."""
        return list(self.message.get("tool_calls", ()))


@dataclass(frozen=True)
class Piece:
    """One token of a stream, and the text that became certain with it, perhaps none; `str` gives the text alone.

    The last piece has no token: it has the text that was held back until the end, and the whole `result`.
    """

    text: str
    token_id: int | None = None
    logprob: float | None = None
    result: GeneratedText | None = None

    def __str__(self) -> str:
        return self.text


def load(
    name: str | os.PathLike[str] | None = None,
    *,
    device: str = shared.AUTO,
    dtype: str = shared.AUTO,
    kv_cache: str = shared.AUTO,
    threads: int | None = None,
    drafts: str = shared.AUTO,
    adapters: Sequence[str] = (),
    context: int | None = None,
    rows: int | None = None,
    preset: str | None = None,
    chat_template: str | None = None,
    template_variables: Mapping[str, Any] | None = None,
    quiet: bool = True,
) -> Model:
    """Load a model: a folder, a hub id or an alias; without a name the built-in storyteller.

    The options are those of the commands: `drafts` is --draft. `rows` texts run side by side; by default all that
    fit, which takes a card's free memory. Unless `quiet`, stderr gets the lines of the commands; warnings come anyway.
    Raises: LLMCliError and its subclasses in `llmcli.errors`
    """
    options = shared.RunOptions(
        model=None if name is None else find_alias(os.fspath(name)),
        adapter=list(adapters),
        context=None if context is None else integer_of("context", context, 1),
        draft=find_alias(drafts),
        devices=shared.DeviceOptions(device, dtype, kv_cache, threads),
    )
    rows = None if rows is None else integer_of("rows", rows, 1, lazy.runners.MAX_ROWS)
    with _quiet(quiet):
        request = check_run(options, {}, shared.SamplerOptions(preset=preset), None)
        run = open_run(request, options.model)
        variables = template_variables or {}
        lines = Lines(run=run, request=request, chat_template=chat_template, template_variables=variables)
        return Model(lines, run.load(rows, host_rows=rows or 1))


@contextmanager
def _quiet(quiet: bool) -> Iterator[None]:
    before, terminal.is_quiet = terminal.is_quiet, quiet
    try:
        yield
    finally:
        terminal.is_quiet = before


class Model:
    """A loaded model, from `load`. For one thread; streams may be read in turn.

    `close`, or the end of a `with`, frees the memory of the card. Every method raises UsageError for what cannot be,
    and other subclasses of LLMCliError.

    Attributes: name; tokenizer; context: the most tokens of prompt and new text together; description: device and
    precision
    """

    def __init__(self, lines: Lines, loaded: LoadedRunner):
        session = lines.run.session
        self.name = session.name
        self.tokenizer: Tokenizer = session.tokenizer
        self.context = lines.run.context
        self.description = loaded.runner.description
        self._lines = lines
        # As in a batch: nobody needs the next token at once, so a new prompt never waits.
        self._scheduler: lazy.scheduler.Scheduler | None = lazy.scheduler.Scheduler(
            loaded.runner, session.tokenizer, wait_seconds=math.inf, drafting=loaded.drafting
        )
        self._inboxes: dict[int, deque[Event]] = {}  # by the number of the request

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<llmcli.Model {self.name}: {'closed' if self._scheduler is None else self.description}>"

    def close(self) -> None:
        """Free the memory of the model. Streams under way raise UsageError; a second call does nothing."""
        if self._scheduler is not None:
            self._scheduler.interrupt()
            self._scheduler = None
            gc.collect()  # arrays in cycles

    @overload
    def generate(self, text: str, *, n: None = None, **options: Unpack[Options]) -> GeneratedText: ...
    @overload
    def generate(self, text: str, *, n: int, **options: Unpack[Options]) -> list[GeneratedText]: ...
    def generate(
        self, text: str, *, n: int | None = None, **options: Unpack[Options]
    ) -> GeneratedText | list[GeneratedText]:
        """Continue a text, as `llmcli generate`; with `n`, a list of that many samples."""
        return self._samples(text_of("text", text), n, options)

    @overload
    def chat(self, messages: Prompt, *, n: None = None, **options: Unpack[Options]) -> GeneratedText: ...
    @overload
    def chat(self, messages: Prompt, *, n: int, **options: Unpack[Options]) -> list[GeneratedText]: ...
    def chat(
        self, messages: Prompt, *, n: int | None = None, **options: Unpack[Options]
    ) -> GeneratedText | list[GeneratedText]:
        """Answer messages, or one of the user as a text, in the model's chat template. Otherwise as `generate`."""
        return self._samples(
            [{"role": "user", "content": messages}] if isinstance(messages, str) else messages, n, options
        )

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Iterator[Piece]:
        """The text of `generate`, or for messages that of `chat`, in pieces as it comes; leave the loop to stop."""
        return self._stream(self._asked(prompt, 1, _take_seed(options), options))

    def _stream(self, asked: Asked) -> Iterator[Piece]:
        for _, piece in self._pieces([asked]):
            if piece.result is not None and piece.result.error is not None:
                raise piece.result.error
            yield piece

    def batch(self, prompts: Iterable[Prompt], **options: Unpack[Options]) -> list[GeneratedText]:
        """A text for each prompt, a text or messages, side by side; in their order.

        The texts are those of `llmcli batch`: prompt k has sample index k - 1 of the seed. As there, what is wrong with
        a prompt is found before any text runs, and raises; an error of one text while it runs ends that text alone.
        Its result has the `error`, and a RuntimeWarning counts such texts, so that hours of others are not lost, and
        nobody takes a part for the whole unawares.
        """
        if isinstance(prompts, str):
            raise UsageError("prompts is one text, expected a list of prompts")
        seed, asked = _take_seed(options), []
        options.setdefault("logprobs", False)
        for number, prompt in enumerate(prompts, start=1):
            try:
                asked.append(self._asked(prompt, number, seed, options))
            except (UsageError, TokenizerError) as error:
                raise UsageError(f"prompt {number}: {error}") from error
        with loaded_objects_set_aside():
            results = self._texts(asked, keeps_failed=True)
        failed = [(number, result.error) for number, result in enumerate(results, start=1) if result.error]
        if failed:
            first, why = failed[0]
            what = f"{len(failed)} of {len(results)} texts failed, the first at prompt {first}: {why}"
            warnings.warn(f"{what}; see `error` of the results", RuntimeWarning, stacklevel=2)
        return results

    def logprobs(self, text: str) -> Text:
        """The model's log-probability of each token of a text that is given, after its first, such as BOS."""
        request, _ = self._asked(text_of("text", text), 1, 0, {})
        token_ids = request.prompt_token_ids
        if len(token_ids) < 2:
            raise UsageError("the text has a single token, expected 2 or more: the first has no probability")
        scores: dict[int, float] = {}
        for _, event in self._events([replace(request, max_new_tokens=0, scores_prompt=True)]):
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, PromptScored):
                scores.update(enumerate((view.chosen.logprob for view in event.views), start=event.first))
        logprobs = tuple(scores[place] for place in range(1, len(token_ids)))
        is_whole = token_ids[0] in self.tokenizer.special_token_ids
        scored = decode(self.tokenizer, token_ids[1:], at_start=is_whole)
        return Text(scored, token_ids[1:], logprobs, token_ids[:1], self.tokenizer)

    def _samples(self, prompt: Prompt, n: int | None, options: Options) -> GeneratedText | list[GeneratedText]:
        request, task = self._asked(prompt, 1, _take_seed(options), options)
        if n is None:
            return self._texts([(request, task)])[0]
        return self._texts([(replace(request, samples=tuple(range(integer_of("n", n, 1, 10_000)))), task)])

    def _asked(self, prompt: Prompt, number: int, seed: int, options: Options) -> Asked:
        keys = {key: value for key, value in options.items() if key != "logprobs"}
        line = line_of({**keys, "prompt" if isinstance(prompt, str) else "messages": prompt}, number)
        task = self._lines.task(line)
        request = self._lines.request_of(task, seed)
        return replace(request, num_alternatives=0 if options.get("logprobs", True) else None), task

    def _texts(self, asked: Sequence[Asked], *, keeps_failed: bool = False) -> list[GeneratedText]:
        """The texts of each request's samples, in order. With `keeps_failed` an error of one text is its result."""
        ended = []
        for index, piece in self._pieces(asked):
            if piece.result is not None:
                if piece.result.error is not None and not keeps_failed:
                    raise piece.result.error
                ended.append((index, piece.result))
        return [result for _, result in sorted(ended, key=lambda one: (one[0], one[1].sample))]

    def _pieces(self, asked: Sequence[Asked]) -> Iterator[tuple[int, Piece]]:
        """Each piece with the index of its request; a text that failed ends with a result, too."""
        tokens: defaultdict[tuple[int, int], list[Token]] = defaultdict(list)
        for index, event in self._events([request for request, _ in asked]):
            if isinstance(event, Token):
                tokens[index, event.sample].append(event)
                yield index, Piece(event.text, event.token_id, _logprob(event))
            elif isinstance(event, Finished | Failed):
                (request, task), said = asked[index], tokens.pop((index, event.sample), [])
                logprobs = tuple(logprob for token in said if (logprob := _logprob(token)) is not None)
                rest = logprobs, request.prompt_token_ids, self.tokenizer, request.sampler.seed, event.sample
                if isinstance(event, Failed):
                    text, ids = "".join(token.text for token in said), tuple(token.token_id for token in said)
                    end = None, Timings(0, 0.0, 0.0, 0, 0.0), message_of(text, None), event.error
                    yield index, Piece("", result=GeneratedText(text, ids, *rest, "failed", *end))
                else:
                    message = task.message(event, request.sampler.seed)
                    end_of_text = event.finish_reason, event.is_complete, event.timings, message
                    result = GeneratedText(event.text, event.token_ids, *rest, *end_of_text)
                    yield index, Piece(event.tail, result=result)

    def _events(self, requests: Sequence[Request]) -> Iterator[tuple[int, Event]]:
        """Each event with the index of its request, to the end of all. Leaving early cancels what is left."""
        inbox: deque[Event] = deque()
        numbers: dict[int, int] = {}
        num_open = sum(len(request.samples) for request in requests)
        try:
            for index, request in enumerate(requests):
                number = self._engine().submit(request)
                numbers[number], self._inboxes[number] = index, inbox
            while num_open:
                while not inbox:
                    self._step()
                event = inbox.popleft()
                num_open -= isinstance(event, Finished | Failed)
                yield numbers[event.request], event
        finally:
            for number in numbers:
                del self._inboxes[number]
                if self._scheduler is not None:
                    self._scheduler.cancel(number)

    def _step(self) -> None:
        """Run a step, and deal its events out. A Ctrl-C, or a device that fails, ends all texts under way."""
        if self._engine().is_idle:
            raise LLMCliError("the text is incomplete: a Ctrl-C in another call ended it")
        events: list[Event] = []
        try:
            events = self._engine().step()
        except BaseException as error:
            events = self._engine().interrupt()
            if isinstance(error, KeyboardInterrupt):  # notebooks keep its frames, and so a card's memory after `close`
                error.__traceback__ = None
            raise
        finally:
            for event in events:
                if event.request in self._inboxes:
                    self._inboxes[event.request].append(event)

    def _engine(self) -> lazy.scheduler.Scheduler:
        if self._scheduler is None:
            raise UsageError(f"{self.name} is closed; load it again")
        return self._scheduler


def _logprob(token: Token) -> float | None:
    return None if token.inspection is None else token.inspection.chosen.logprob


def _take_seed(options: Options) -> int:
    seed = options.pop("seed", None)
    return secrets.randbits(32) if seed is None else seed_of("seed", seed)
