"""`llmcli chat`: a conversation of many turns, on a terminal or in a script."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import typer

from llmcli.cli import lazy, shared
from llmcli.cli.chat_session.answer import TextWriter, Writer
from llmcli.cli.chat_session.commands import show_end
from llmcli.cli.chat_session.kept_chats import Keeper, names_file, show_list
from llmcli.cli.chat_session.loop import answer_all, converse, open_prompt_line, read_messages
from llmcli.cli.chat_session.remote import RemoteChat, RemoteTalk
from llmcli.cli.chat_session.state import OVERFLOW, THINKING, ChatSession, Talk
from llmcli.cli.command import given_options, option
from llmcli.cli.completion import complete_chat
from llmcli.cli.constrained_texts import SchemaOptions, Schemas
from llmcli.cli.prompt import chosen_word, parse_template_variables, refuse_undecoded
from llmcli.cli.run import RunRequest, check_run, open_run
from llmcli.cli.session import EncodedPrompt, Session
from llmcli.cli.settings import running
from llmcli.cli.terminal import terminal
from llmcli.cli.units import counted
from llmcli.engine.conversation import Conversation, SavedConversation, load_conversation
from llmcli.errors import EXIT_INTERRUPTED, UsageError
from llmcli.reading import TOOLS, object_of_unique_keys, parse_json
from llmcli.resources import chat_folder

conversation_option = partial(option, rich_help_panel="Conversation")

# The options that a chat with a server takes; the others are for a model that runs here.
WITH_SERVER = frozenset(
    {"--server", "--api-key", "--system", "--message", "--resume", "--continue", "--max-new-tokens", "--stop", "--seed"}
    | {"--markdown", "--thinking", "--tools"}
)


@dataclass(frozen=True)
class ConversationOptions:
    """The messages, and the conversation they belong to.

    Raises: UsageError for flags that exclude each other, and for messages that are not text.
    """

    server: str | None = conversation_option(None, "Talk with the model of this server.", metavar="URL")
    api_key: str | None = conversation_option(
        None, "The key of --server.", metavar="KEY", envvar=shared.KEY_VARIABLE, hide_input=True
    )
    system: str | None = shared.system_option()
    chat_template: str | None = shared.chat_template_option()
    template_var: list[str] | None = shared.template_var_option()
    message: list[str] | None = shared.prompt_option(None, "Answer this message and exit; repeatable.", metavar="TEXT")
    resume: str | None = conversation_option(
        None,
        "Resume a chat: its name or number in --list, or a file written by /save.",
        metavar="NAME|FILE",
        complete=complete_chat,
    )
    continue_: bool = conversation_option(False, "Resume the last conversation.")
    list_: bool = conversation_option(False, "List the kept chats and exit.")
    rows: str = shared.rows_option("1")
    overflow: str = conversation_option(
        "drop-oldest",
        "What to do when the context is full: drop-oldest (turns), or stop.",
        metavar="POLICY",
        words=("drop-oldest", "stop"),
        hidden=True,
    )

    def __post_init__(self) -> None:
        if self.resume is not None and self.continue_:
            raise UsageError("--resume and --continue cannot be combined")
        # The variable and the file are for all runs, so they do not conflict with this one.
        if self.server is None and self.api_key is not None and "api_key" not in running.configured:
            raise UsageError("--api-key needs --server URL")
        for message in self.message or ():
            if not message.strip():
                raise UsageError("--message is empty; give it a text")
            refuse_undecoded(message, "--message")
        chosen_word("--overflow", self.overflow, OVERFLOW)
        shared.parse_rows(self.rows)
        parse_template_variables(self.template_var)
        refuse_undecoded(self.system, "--system")

    @property
    def is_interactive(self) -> bool:
        """Whether someone types."""
        return not self.message and sys.stdin is not None and sys.stdin.isatty()  # None: the caller closed it

    @property
    def is_kept(self) -> bool:
        """Whether the conversation is one that chat keeps on its own: only then may a script replace it."""
        return self.is_interactive or self.continue_ or (self.resume is not None and not names_file(self.resume))

    def files(self, saved: SavedConversation | None) -> dict[Path, SavedConversation]:
        """The file that the conversation comes from and what it holds, if it is not a kept one."""
        is_file = self.resume is not None and names_file(self.resume)
        return {Path(self.resume): saved} if is_file and self.resume and saved else {}

    def source(self, keeper: Keeper) -> Path | None:
        """The file to resume, held by `keeper` if it is a kept one. Raises: UsageError if there is none"""
        if self.continue_:
            return keeper.continue_last()
        if self.resume is None or names_file(self.resume):
            return None if self.resume is None else Path(self.resume)
        return keeper.continue_named(self.resume)


@dataclass(frozen=True)
class AnswerOptions:
    """What ends an answer, and its schema."""

    max_new_tokens: int | None = shared.stopping_option(
        None, "Stop an answer after this many new tokens.", min=1, show_default="until the context is full"
    )
    stop: list[str] | None = shared.stop_option()
    schema: SchemaOptions = SchemaOptions()
    tools: Path | None = conversation_option(None, "Offer these tools; you type the results of calls.")

    def read_tools(self) -> lazy.tools.Tools | None:
        """The tools in the file. Raises: UsageError for what are no tools, and beside a schema"""
        if self.tools is None:
            return None
        if given_options(self.schema):
            raise UsageError(f"--tools and {given_options(self.schema)[0]} cannot be combined")
        try:
            return lazy.tools.read_tools({"tools": parse_json(TOOLS.read_text(self.tools), object_of_unique_keys)})
        except ValueError as error:
            raise UsageError(f"{self.tools} is not valid JSON: {error}") from error


@dataclass(frozen=True)
class ViewOptions:
    """How answers are shown. Raises: UsageError for an unknown way"""

    markdown: bool = shared.output_option(False, "Render Markdown on a terminal.")
    thinking: str = shared.output_option(
        "fold",
        "What to do with a model's reasoning: show, fold or hide.",
        metavar="HOW",
        words=("show", "fold", "hide"),
    )
    json_: bool = shared.output_option(False, "In a script: print one JSON object with token ids and times.")
    verbose: bool = shared.output_option(False, "Print times and rates after each answer.")

    def __post_init__(self) -> None:
        chosen_word("--thinking", self.thinking, THINKING)


def chat(
    *,
    argument: str | None = shared.model_argument(),
    options: shared.RunOptions,
    conversation: ConversationOptions,
    answers: AnswerOptions,
    numbers: shared.SamplingNumbers,
    sampler: shared.SamplerOptions,
    view: ViewOptions,
    messages: shared.MessageOptions,
) -> None:
    """Talk with a model.

    Examples:

    llmcli chat my-model --system "You are a teacher."

    llmcli chat my-model --message "What is a prime?"

    llmcli chat --server http://127.0.0.1:8080

    llmcli chat --list
    """
    if conversation.list_:
        show_list(chat_folder(), as_json=view.json_)
        return
    refuse_without_terminal(conversation, as_json=view.json_)
    tools = answers.read_tools()
    if conversation.server is None:
        grammar = answers.schema.read()
        request = check_run(options, numbers, sampler, answers.stop)
        name = shared.chosen_model(argument, options.model)
        with closing(Keeper(chat_folder())) as keeper:
            saved = _saved(conversation, keeper)
            if saved is not None:
                name = saved.model if name is None else name
                request = _with_adapters_of(saved, request, name)
            name = shared.model_or_default(name)
            state = _open_state(request, name, saved, conversation, answers, view, grammar, tools)
            _talk(state, keeper, conversation, view, require_complete=answers.schema.require_complete)
        return
    if argument is not None:
        raise UsageError("MODEL and --server cannot be combined: the server has its model")
    refuse_beside_server(options, conversation, answers, sampler, view)
    with (
        closing(lazy.server_client.ServerClient(conversation.server, conversation.api_key)) as client,
        closing(Keeper(chat_folder())) as keeper,
    ):
        asked: dict[str, Any] = {
            **numbers,
            "seed": sampler.seed,
            "max_tokens": answers.max_new_tokens,
            "stop": answers.stop,
        }
        asked["tools"] = list(tools.tools) if tools else None
        talk = _open_remote(client, _saved(conversation, keeper), conversation, view, asked)
        _talk(talk, keeper, conversation, view)


def _open_remote(
    client: lazy.server_client.ServerClient,
    saved: SavedConversation | None,
    options: ConversationOptions,
    view: ViewOptions,
    asked: dict[str, Any],
) -> RemoteTalk:
    """A conversation with a server; the server decides what is None in `asked`."""
    model = client.model()
    keys = {"model": model, **{key: value for key, value in asked.items() if value is not None}}
    return RemoteTalk(
        chat=RemoteChat(client, _begun(saved, options), keys),
        model=model,
        thinking=chosen_word("--thinking", view.thinking, THINKING),
        is_markdown=view.markdown,
        files=options.files(saved),
    )


def refuse_beside_server(*groups: object) -> None:
    """Raises: UsageError for options of a model that runs here"""
    for flag in (flag for group in groups for flag in given_options(group)):
        if flag not in WITH_SERVER:
            raise UsageError(f"{flag} cannot be used with --server")


def _saved(options: ConversationOptions, keeper: Keeper) -> SavedConversation | None:
    source = options.source(keeper)
    return None if source is None else load_conversation(source)


def _begun(saved: SavedConversation | None, options: ConversationOptions) -> Conversation:
    """The earlier turns, with the requested system prompt."""
    conversation = saved.conversation if saved else Conversation()
    return conversation if options.system is None else replace(conversation, system=options.system)


def _talk(
    state: Talk, keeper: Keeper, options: ConversationOptions, view: ViewOptions, *, require_complete: bool = False
) -> None:
    """Talk until the user leaves, or until all messages are answered."""
    state.keeper = keeper if options.is_kept else None
    if view.markdown and not sys.stdout.isatty():
        terminal.info("--markdown has no effect: stdout is not a terminal")
    if state.chat.conversation.turns:
        terminal.info(f"Resumed: {counted(len(state.chat.conversation.turns), 'turn')}")
    if options.is_interactive:
        show_end(state.chat.conversation)
        terminal.info("/help lists the commands")
        converse(state, open_prompt_line(chat_folder() / "history", state), lambda: open_writer(state))
    elif not answer_all(
        state, options.message or read_messages(), as_json=view.json_, require_complete=require_complete
    ):
        raise typer.Exit(EXIT_INTERRUPTED)


def _with_adapters_of(saved: SavedConversation, request: RunRequest, name: str | None) -> RunRequest:
    """The request, with the chat's own adapters, which a line names, unless the user names others or another model."""
    if saved.adapters and not request.adapters and name == saved.model:
        return replace(request, adapters=shared.parse_adapters(saved.adapters))
    used = tuple(adapter.text for adapter in request.adapters)
    if used != saved.adapters:
        held, now = (" and ".join(names) or "no adapter" for names in (saved.adapters, used))
        terminal.info(f"This chat was held with {held}; it is resumed with {now}")
    return request


def refuse_without_terminal(options: ConversationOptions, *, as_json: bool) -> None:
    """Check the flags against where chat runs.

    Raises: UsageError if someone types and could not see the prompt, or asks for what a script reads.
    """
    if not options.is_interactive:
        return
    if as_json:
        raise UsageError("--json is for scripts; give --message TEXT, or lines on standard input")
    if not (sys.stderr.isatty() or sys.stdout.isatty()):
        raise UsageError("no terminal to chat on: stdout and stderr are redirected; give --message TEXT")


def _open_state(
    request: RunRequest,
    name: str | None,
    saved: SavedConversation | None,
    options: ConversationOptions,
    answers: AnswerOptions,
    view: ViewOptions,
    grammar: lazy.grammar.Grammar | None,
    tools: lazy.tools.Tools | None,
) -> ChatSession:
    """Load the model, and the earlier turns."""
    run = open_run(request, name)
    session = run.session
    variables = parse_template_variables(options.template_var)
    template, turn_end_token_ids = session.open_template(options.chat_template, variables)
    sampler = run.sampler(EncodedPrompt("", (), at_start=True, turn_end_token_ids=turn_end_token_ids))
    schemas = Schemas(session)
    schemas.prepare(grammar, sampler)
    offered = None if tools is None else _offer(tools, template, session, schemas, sampler)
    num_rows = shared.parse_rows(options.rows)
    loaded = run.load(num_rows, host_rows=num_rows or 1)
    overflow = chosen_word("--overflow", options.overflow, OVERFLOW)
    schema = None if grammar is None else schemas.schema(grammar, sampler)
    settings = lazy.chat.ChatSettings(sampler, answers.max_new_tokens, run.stop_strings, overflow, schema, offered)
    return ChatSession(
        session=session,
        chat=lazy.chat.Chat(
            loaded.runner, session.tokenizer, template, settings, _begun(saved, options), loaded.drafting
        ),
        model=run.model,
        adapters=tuple(adapter.text for adapter in request.adapters),
        sampling=run.sampling,
        sampler_flags=run.flags,
        turn_end_token_ids=turn_end_token_ids,
        thinking=chosen_word("--thinking", view.thinking, THINKING),
        is_markdown=view.markdown,
        is_verbose=view.verbose,
        load_seconds=loaded.load_seconds,
        files=options.files(saved),
    )


def _offer(
    tools: lazy.tools.Tools,
    template: lazy.chat_encoding.ChatTemplate,
    session: Session,
    schemas: Schemas,
    sampler: lazy.params.Sampler,
) -> lazy.chat.ChatTools:
    """The tools, in the template from now on. Raises: UsageError for a template without a form of tool calls"""
    offer = lazy.tool_offer.Offer.of(tools, template)
    template.variables["tools"] = list(tools.tools)
    token_ids = offer.token_ids(session.tokenizer)

    @cache
    def grammar_after(start: lazy.chat_events.Start) -> lazy.grammar.Grammar:
        value = {**offer.constraint_value(), "start": start}
        return lazy.grammar.grammar_of(lazy.constraint.Constraint("tools", "tools", value))

    usual = grammar_after("undecided")
    for note in usual.notes:
        terminal.info(note)
    schemas.prepare(usual, sampler)
    return lazy.chat.ChatTools(offer, token_ids, lambda start: schemas.schema(grammar_after(start), sampler, token_ids))


def open_writer(state: Talk) -> Writer:
    """What shows the next answer: Markdown is rendered only where stdout is a terminal."""
    return lazy.markdown.MarkdownWriter() if state.is_markdown and sys.stdout.isatty() else TextWriter()
