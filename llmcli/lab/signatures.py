"""The parameters of a source's kernels, so that arguments are found by their names."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcli.errors import UsageError

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_KERNEL = re.compile(r"__global__[^;{]*?(\w+)\s*\(([^(){};]*)\)\s*\{")
_LAUNCH_BOUNDS = re.compile(r"__launch_bounds__\s*\([^()]*\)|ROW_LAUNCH_BOUNDS\s*\([^()]*\)")
_QUALIFIERS = re.compile(r"\b(?:const|volatile|__restrict__|__restrict|__grid_constant__)\b")
_SCALARS: dict[str, Any] = {
    "int": np.int32,
    "int32_t": np.int32,
    "unsigned": np.uint32,
    "unsigned int": np.uint32,
    "uint32_t": np.uint32,
    "long long": np.int64,
    "int64_t": np.int64,
    "size_t": np.uint64,
    "uint64_t": np.uint64,
    "unsigned long long": np.uint64,
    "float": np.float32,
    "double": np.float64,
}
# Elements that a pointer of this type may read; other types (float4, a template's T) read what they like.
_ELEMENTS = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "__half": "float16",
    "__nv_bfloat16": "uint16",
    "int": "int32",
    "unsigned int": "uint32",
    "uint32_t": "uint32",
    "int8_t": "int8",
    "signed char": "int8",
    "uint8_t": "uint8",
    "unsigned char": "uint8",
}


@dataclass(frozen=True)
class Parameter:
    """A kernel's parameter: the C type without qualifiers, and whether it is a pointer."""

    name: str
    type: str
    is_pointer: bool

    def argument(self, values: Mapping[str, Any], kernel: str) -> Any:
        """The value of this name, as the kernel takes it.

        Raises: UsageError if there is none, or if it has another type
        """
        if self.name not in values:
            raise UsageError(f"kernel {kernel} asks for {self.name!r}; here are {', '.join(sorted(values))}")
        value = values[self.name]
        is_array = hasattr(value, "data") and hasattr(value, "strides") and bool(value.shape)
        if is_array != self.is_pointer:
            kind = "an array" if is_array else "a number"
            raise UsageError(f"kernel {kernel}: {self.name} is {kind}, the parameter is `{self.declared}`")
        if is_array:
            wanted = _ELEMENTS.get(self.type)
            if wanted is not None and value.dtype != np.dtype(wanted):
                raise UsageError(f"kernel {kernel}: {self.name} is {value.dtype}, the parameter is `{self.declared}`")
            return value
        if self.type not in _SCALARS:
            raise UsageError(f"kernel {kernel}: `{self.declared}` is not a number that a launch can pass")
        return _SCALARS[self.type](value)

    def takes_as(self, other: "Parameter") -> bool:
        """Whether it takes what is passed to the other: of the same name, both addresses or numbers of one type.

        What an address points to is not compared.
        """
        types = [_SCALARS.get(one.type, one.type) for one in (self, other)]
        is_alike = self.name == other.name and self.is_pointer == other.is_pointer
        return is_alike and (self.is_pointer or types[0] == types[1])

    @property
    def declared(self) -> str:
        """As in the source, without qualifiers."""
        return f"{self.type}{'*' if self.is_pointer else ''} {self.name}"


def kernel_parameters(source: str) -> dict[str, tuple[Parameter, ...]]:
    """The parameters of every kernel that a source defines, by the kernel's name."""
    text = _LAUNCH_BOUNDS.sub("", _COMMENT.sub("", source))
    return {
        match[1]: tuple(_parameter(part) for part in match[2].split(",") if part.strip())
        for match in _KERNEL.finditer(text)
    }


def _parameter(text: str) -> Parameter:
    words = " ".join(_QUALIFIERS.sub(" ", text).replace("*", " * ").split())
    kind, _, name = words.rpartition(" ")
    return Parameter(name, kind.replace("*", "").strip(), "*" in kind)
