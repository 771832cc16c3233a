"""The types of llmcli's names, which `__init__.py` imports late."""

from llmcli.api import GeneratedText as GeneratedText
from llmcli.api import Model as Model
from llmcli.api import Piece as Piece
from llmcli.api import Text as Text
from llmcli.api import load as load
from llmcli.errors import LLMCliError as LLMCliError

__version__: str
