"""`llmcli chat`: a conversation of many turns, on a terminal or in a script."""

import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from llmcli.cli.chat_session.doors import open_chat, open_line_editor, open_template, open_writer
from llmcli.cli.chat_session.loop import converse
from llmcli.cli.chat_session.scripted import answer_all, read_messages
from llmcli.cli.chat_session.state import ChatSession, overflow_policy, replace_system, thinking_view
from llmcli.cli.chat_session.turn_commands import count_turns
from llmcli.cli.device_choice import RunnerOptions, start_device
from llmcli.cli.options import (
    OUTPUT_PANEL,
    PROMPT_PANEL,
    STOPPING_PANEL,
    ChatTemplateOption,
    ContextOption,
    DebugOption,
    DeviceOption,
    DryBreakerOption,
    DtypeOption,
    KvCacheOption,
    LogitBiasOption,
    ModelArgument,
    ModelOption,
    PresetOption,
    QuietOption,
    SamplerOrderOption,
    SeedOption,
    StopOption,
    SystemOption,
    ThreadsOption,
    chosen_model,
    sampling_options,
)
from llmcli.cli.prompt import checked_stop_strings
from llmcli.cli.sampler_flags import parse_sampler_flags
from llmcli.cli.session import EncodedPrompt, open_session
from llmcli.cli.terminal import terminal
from llmcli.engine.conversation import Conversation
from llmcli.engine.conversation_file import SavedConversation, load_conversation
from llmcli.errors import EXIT_INTERRUPTED, UsageError
from llmcli.resources import STORYTELLER, chat_folder

CONVERSATION_PANEL = "Conversation"


@dataclass(frozen=True)
class ChatOptions:
    """The flags that belong to chat alone, checked against each other and against where it runs."""

    resume: Path | None
    is_continued: bool
    messages: tuple[str, ...]
    as_json: bool

    def __post_init__(self) -> None:
        if self.resume is not None and self.is_continued:
            raise UsageError("--resume and --continue exclude each other; give one of them")
        if any(not message.strip() for message in self.messages):
            raise UsageError("--message is empty, expected a text")
        if self.as_json and self.is_interactive:
            raise UsageError("--json is for scripts; give --message TEXT, or lines on standard input")
        if self.is_interactive and not (sys.stderr.isatty() or sys.stdout.isatty()):
            raise UsageError(
                "there is no terminal to show a prompt on, as stdout and stderr are redirected; give --message TEXT"
            )

    @property
    def is_interactive(self) -> bool:
        """Whether someone types."""
        return not self.messages and sys.stdin is not None and sys.stdin.isatty()  # None: the caller closed it

    def begin(self) -> SavedConversation | None:
        """The conversation to go on with, None for a new one.

        Raises: UsageError if there is none, or its file cannot be read.
        """
        if self.resume is not None:
            return load_conversation(self.resume)
        if not self.is_continued:
            return None
        if not last_conversation_path().exists():
            raise UsageError(f"--continue: there is no last conversation yet ({last_conversation_path()})")
        return load_conversation(last_conversation_path())


def last_conversation_path() -> Path:
    """Where the last conversation is saved as it goes."""
    return chat_folder() / "last.json"


@sampling_options
def chat(
    sampling_flags: dict[str, float | int | None],
    model: ModelArgument = None,
    model_option: ModelOption = None,
    system: SystemOption = None,
    chat_template: ChatTemplateOption = None,
    message: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="Answer this and leave; repeatable, one answer each.", rich_help_panel=PROMPT_PANEL
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Go on with a conversation saved by /save.", rich_help_panel=CONVERSATION_PANEL
        ),
    ] = None,
    continue_: Annotated[
        bool,
        typer.Option("--continue", help="Go on with the last conversation.", rich_help_panel=CONVERSATION_PANEL),
    ] = False,
    overflow: Annotated[
        str,
        typer.Option(
            metavar="POLICY",
            help="When the context is full: drop-oldest turns, or stop.",
            rich_help_panel=CONVERSATION_PANEL,
        ),
    ] = "drop-oldest",
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Stop an answer after this many tokens.",
            show_default="until the context is full",
            rich_help_panel=STOPPING_PANEL,
        ),
    ] = None,
    stop: StopOption = None,
    preset: PresetOption = None,
    logit_bias: LogitBiasOption = None,
    sampler_order: SamplerOrderOption = None,
    dry_breaker: DryBreakerOption = None,
    seed: SeedOption = None,
    context: ContextOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    kv_cache: KvCacheOption = "auto",
    threads: ThreadsOption = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Render Markdown on a terminal.", rich_help_panel=OUTPUT_PANEL)
    ] = False,
    thinking: Annotated[
        str,
        typer.Option(
            metavar="HOW",
            help="A model's reasoning: show, fold or hide.",
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = "fold",
    json_: Annotated[
        bool,
        typer.Option("--json", help="In a script: one JSON object with ids and times.", rich_help_panel=OUTPUT_PANEL),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="After each answer, what it cost.", rich_help_panel=OUTPUT_PANEL)
    ] = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Talk with a model.

    [bold]Examples[/bold]

    llmcli chat path/to/model --system "You are a patient teacher." --markdown

    llmcli chat path/to/model --message "What is a prime?" --message "Name three." --json
    """
    start_device(device)
    runner_options = RunnerOptions(device, dtype, threads, kv_cache)
    options = ChatOptions(resume, continue_, tuple(message or ()), json_)
    view, policy = thinking_view("--thinking", thinking), overflow_policy("--overflow", overflow)
    flags = parse_sampler_flags(logit_bias, sampler_order, dry_breaker)
    stop_strings = checked_stop_strings(stop)
    saved = options.begin()
    name = chosen_model(model, model_option)
    if name is None and saved is not None:
        name = saved.model
    conversation = saved.conversation if saved else Conversation()
    if system is not None:
        conversation = replace_system(conversation, system)

    session = open_session(name)
    sampling = session.resolve_sampling(sampling_flags, preset, flags, stop_strings)
    stop_strings = session.resolve_stop_strings(stop_strings)
    session.say_what_is_not_applied()
    template, turn_end_token_ids = open_template(session, chat_template)
    max_seq_len = session.resolve_context(context)
    run_seed = secrets.randbits(32) if seed is None else seed
    no_prompt = EncodedPrompt("", (), at_start=True, turn_end_token_ids=turn_end_token_ids)
    sampler = session.sampler(sampling.params, run_seed, no_prompt, flags)
    runner, load_seconds = session.load_runner(runner_options, max_seq_len)
    terminal.info(f"{session.name}: {runner.description}{runner_options.note}, context {max_seq_len}, seed {run_seed}")

    state = ChatSession(
        session=session,
        chat=open_chat(
            session,
            runner,
            template,
            sampler,
            conversation,
            max_new_tokens=max_new_tokens,
            stop_strings=stop_strings,
            overflow=policy,
        ),
        model=name if name is not None else STORYTELLER,
        sampling=sampling,
        sampler_flags=flags,
        turn_end_token_ids=turn_end_token_ids,
        thinking=view,
        is_markdown=markdown,
        is_verbose=verbose,
        load_seconds=load_seconds,
        # A script must not take the place of what somebody talked about.
        last_path=last_conversation_path() if options.is_interactive or options.is_continued else None,
        named_path=resume,
    )
    if markdown and not sys.stdout.isatty():
        terminal.info("--markdown: stdout is no terminal, the text stays as it is")
    if saved is not None:
        terminal.info(f"going on after {count_turns(conversation)}")
    if options.is_interactive:
        terminal.info("/help lists the commands")
        editor = open_line_editor(chat_folder() / "history")
        converse(state, editor, lambda: open_writer(state))
    elif not answer_all(state, options.messages or read_messages(), as_json=json_):
        raise typer.Exit(EXIT_INTERRUPTED)
