"""`Offer`: the tools of a request in a model's chat template, and the form in which the model calls them."""

from dataclasses import dataclass
from typing import Any

from llmcli.errors import UsageError
from llmcli.tokenizer.base import Tokenizer
from llmcli.tokenizer.chat_encoding import ChatTemplate
from llmcli.tool_calls import SINGLE_SIGN, CallReader, Form, form_of
from llmcli.tools import Tools


@dataclass(frozen=True)
class Offer:
    """The tools of a request, and the form in which the model calls them."""

    tools: Tools
    form: Form
    is_single: bool  # the chat template refuses several calls in a message

    @classmethod
    def of(cls, tools: Tools, template: ChatTemplate) -> "Offer":
        """The tools in the form that the template shows. Raises: UsageError for a template without one"""
        form = form_of(template.tool_source) if template.takes_tools else None
        if form is None:
            what = "shows no form of tool calls that is known here" if template.takes_tools else "takes no tools"
            raise UsageError(f"{template.origin} {what}; use a model that was trained to call tools")
        return cls(tools, form, SINGLE_SIGN in template.tool_source)

    def token_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """The special tokens that calls are written with."""
        parts = {part for spelling in self.form.spellings for part in spelling.parts}
        found = {tokenizer.token_id(part) for part in parts}
        return frozenset(one for one in found if one is not None and one in tokenizer.special_token_ids)

    def reader(self) -> CallReader:
        """A reader of an answer."""
        return CallReader(self.form, [tool["function"]["name"] for tool in self.tools.tools])

    def constraint_value(self) -> dict[str, Any]:
        """What holds an answer to the tools, as JSON."""
        tools = self.tools
        return {
            "form": self.form.name,
            "tools": [tool["function"] for tool in tools.tools],
            "names": tools.names,
            "must_call": tools.must_call,
            "is_single": self.is_single or not tools.is_parallel,
        }
