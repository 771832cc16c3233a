"""`GrammarProcess`: reads what strangers ask texts to be held to, within bounds on time and memory.

Few keywords make an automaton of millions of states, such as several `multipleOf`. So a child process reads it first.
"""

from dataclasses import asdict

from llmcli.errors import UsageError
from llmcli.schema.grammar import Grammar
from llmcli.schema.held_to import HeldTo
from llmcli.tokenizer.bounded_process import BoundedProcess

LIMIT_SECONDS = 5.0  # a schema of a thousand properties takes 0.4 s


class GrammarProcess:
    """See the module. The process starts with the first request."""

    def __init__(self) -> None:
        self._process = BoundedProcess(
            "llmcli.schema.grammar_sandbox", "llguidance", "the schema", "give a simpler schema"
        )

    def grammar(self, held_to: HeldTo) -> Grammar:
        """The grammar.

        Raises: as `grammar_of`; TokenizerError for what takes too long, or too much memory
        """
        answer = self._process.ask(asdict(held_to), LIMIT_SECONDS)
        if isinstance(answer, str):
            raise UsageError(answer)
        return Grammar(answer["name"], answer["lark"], tuple(answer["notes"]))
