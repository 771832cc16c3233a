"""Every kernel with a launcher, of the engine and of the lab, and the cases of each: what tests and `verify` run."""

from importlib import import_module
from pkgutil import iter_modules

from llmcli.kernels import registry
from llmcli.kernels.spec import KernelSpec
from llmcli.lab import cases, row_kernels
from llmcli.lab.problem import KernelCases

_SPECS = (*registry.KERNELS.values(), *(one for one in vars(row_kernels).values() if isinstance(one, KernelSpec)))
_MODULES = [import_module(f"llmcli.lab.cases.{module.name}") for module in iter_modules(cases.__path__)]
_FOUND = [value for module in _MODULES for value in vars(module).values() if isinstance(value, KernelCases)]

KERNELS: dict[str, KernelSpec] = {spec.stem: spec for spec in sorted(_SPECS, key=lambda spec: spec.stem)}
CASES: dict[str, KernelCases] = {of.stem: of for of in sorted(_FOUND, key=lambda of: of.stem)}
