"""The cases of every kernel of the engine, by its stem: what tests and `llmcli verify` run."""

from importlib import import_module
from pkgutil import iter_modules

from llmcli.lab import cases
from llmcli.lab.problem import KernelCases

CASES: dict[str, KernelCases] = {
    module.name: import_module(f"llmcli.lab.cases.{module.name}").CASES for module in iter_modules(cases.__path__)
}
