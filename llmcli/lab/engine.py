"""The cases of every kernel of the engine, by its stem: what tests and `llmcli verify` run."""

from importlib import import_module
from pkgutil import iter_modules

from llmcli.lab import cases
from llmcli.lab.problem import KernelCases

_MODULES = [import_module(f"llmcli.lab.cases.{module.name}") for module in iter_modules(cases.__path__)]
_FOUND = [value for module in _MODULES for value in vars(module).values() if isinstance(value, KernelCases)]

CASES: dict[str, KernelCases] = {of.stem: of for of in sorted(_FOUND, key=lambda of: of.stem)}
