"""Every kernel of the engine by its stem, in alphabetical order: what the tests compile and the documentation lists."""

from importlib import import_module
from pkgutil import iter_modules

from llmcli import kernels
from llmcli.kernels.spec import KernelSpec

_MODULES = [import_module(f"llmcli.kernels.{module.name}") for module in iter_modules(kernels.__path__)]
_FOUND = [value for module in _MODULES for value in vars(module).values() if isinstance(value, KernelSpec)]

KERNELS: dict[str, KernelSpec] = {spec.stem: spec for spec in sorted(_FOUND, key=lambda spec: spec.stem)}
