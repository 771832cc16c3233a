"""Every kernel by its stem: what the tests compile and the documentation lists."""

from importlib import import_module
from pkgutil import iter_modules

from llmcli import kernels
from llmcli.kernels.spec import KernelSpec

KERNELS: dict[str, KernelSpec] = {
    value.stem: value
    for module in iter_modules(kernels.__path__)
    for value in vars(import_module(f"llmcli.kernels.{module.name}")).values()
    if isinstance(value, KernelSpec)
}
