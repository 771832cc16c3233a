"""A card made of the C++ compiler: kernels run on host memory, thread by thread (tests/kernels/emulator)."""

import ctypes
import hashlib
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np

from llmcli.kernels.launches import TYPICAL_CARD, Launch, addresses_of, bytes_of
from llmcli.kernels.sources import flatten
from llmcli.lab.notes import Notes, phantoms_of
from llmcli.lab.problem import ENGINE, Problem

COMPILER = "g++"
HEADERS = Path(__file__).with_name("emulator")
# Some systems' g++ defines _FORTIFY_SOURCE, whose longjmp ends programs that switch stacks.
_OPTIONS = (
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-w",
    "-ffp-contract=off",
    "-U_FORTIFY_SOURCE",
    "-ftrivial-auto-var-init=pattern",
)
_PREPROCESS = ("-E", "-P", "-x", "c++", "-std=c++17")
HOPPER, AMPERE = 900, 800
_CANARY = 0xEE

# The call that replaces an assembler's statement, by a part of its text; the first match wins. {} are its operands.
_INSTRUCTIONS = (
    ("mbarrier.init.", "init({})"),
    ("fence.", ""),
    ("griddepcontrol.", ""),
    ("setmaxnreg.", ""),
    ("createpolicy.", ""),
    ("cp.async.mbarrier.arrive.noinc", "arrive_behind_copies({})"),
    ("mapa.shared::cluster.u32 %0", "address_in_block({})"),
    ("mbarrier.arrive.relaxed.cluster", "arrive_there({})"),
    ("mbarrier.try_wait", "is_over({})"),
    ("mbarrier.test_wait", "is_over({})"),
    ("mbarrier.expect_tx", "expect({})"),
    ("cp.async.bulk.shared", "copy_bulk({})"),
    ("cp.async.bulk.prefetch", ""),
    ("cp.async.bulk.global", "store_bulk({})"),
    ("cp.async.bulk.commit", ""),  # a wait is for all
    ("cp.async.bulk.wait", "store_bulk_wait()"),
    ("barrier.cluster.arrive", "cluster_arrive()"),
    ("barrier.cluster.wait", "cluster_wait()"),
    ("mbarrier.arrive", "arrive({})"),
    ("barrier.sync", "sync({})"),
    ("barrier.arrive", "arrive_named({})"),
    ("%cluster_ctarank", "rank({})"),
    ("ld.acquire", "load_acquire({})"),
    ("ld.global.nc.L1::no_allocate.v4", "load_words({})"),
    ("ld.global.nc.v2", "load_words({})"),
    ("ld.global.nc.u8", "load_byte({})"),
    ("ld.global", "load({})"),
    ("ldmatrix.sync.aligned.m8n8.x4.shared", "load_matrices({}, false)"),
    ("ldmatrix.sync.aligned.m8n8.x4.trans", "load_matrices({}, true)"),
    ("movmatrix.", "transpose({})"),
    ("ex2.approx", "exp2({})"),
    ("rcp.approx", "reciprocal({})"),
    ("prefetch.global", ""),
    ("m16n8k16.row.col.f32.f16", "mma(true, {})"),
    ("m16n8k16.row.col.f32.bf16", "mma(false, {})"),
    ("m16n8k32.row.col.s32.s8", "mma_bytes(true, {})"),
    ("m16n8k32.row.col.s32.u8", "mma_bytes(false, {})"),
    ("cp.async.cg.shared.global [", "copy({0}, {1}, 16, {2})"),
    ("cp.async.cg.shared.global.L2", "copy({0}, {1}, 16, 16)"),
    ("cp.async.ca.", "copy({})"),
    ("cp.async.commit", "copy_commit()"),
    ("cp.async.wait", "copy_wait({})"),
    ("max.NaN", "max_nan({})"),
    ("atom.acq_rel.gpu.global.inc", "atomic_inc({})"),
    ("atom.acq_rel.gpu.global.add", "atomic_add({})"),
    ("red.release.gpu.global.add", "reduce_add({})"),
    ("red.relaxed.gpu.global.inc", "reduce_inc({})"),
    ("cvt.rn.f16x2.e4m3x2", "widen_e4m3({})"),
    ("cvt.rn.satfinite.f16x2.f32", "pack_within_range({})"),
    ("lop3.b32 %0, %1, %2, %3, 0xea", "and_or({})"),
    ("lop3.b32 %0, %1, %2, %3, 0x6a", "and_xor({})"),
    ("wgmma.fence", ""),
    ("wgmma.commit", "wgmma_commit()"),
    ("wgmma.wait", "wgmma_wait({})"),
)
# The products of wgmma.cuh have a text for each width, made by macros; these replace all of them.
_NO_PRODUCT = "#define LLMCLI_WGMMA(...) static_cast<void>(0)\n"
_PRODUCT = "#define LLMCLI_WGMMA(TYPE, IS_T, ...) ptx::wgmma_halves(TYPE[0] == 'f', IS_T[0] == '1', d, a, b, adds)\n"


def can_emulate() -> bool:
    """Whether there is a compiler that knows floats of 16 bits, and a library with fibers."""
    text = "#include <ucontext.h>\n_Float16 half = 1;"
    try:
        command = [COMPILER, "-x", "c++", "-std=c++17", "-fsyntax-only", "-"]
        return subprocess.run(command, input=text.encode(), capture_output=True).returncode == 0
    except OSError:
        return False


def translate(text: str, arch: int = HOPPER) -> str:
    """A kernel's flattened text as C++ for the emulator, as a card of `arch` runs it.

    Raises: ValueError for an instruction that it does not know
    """
    text = re.sub(r"^\s*#\s*include\s+<.*$", "", text, flags=re.MULTILINE)
    text = text.replace(_NO_PRODUCT, _PRODUCT)
    command = [COMPILER, *_PREPROCESS, f"-D__CUDA_ARCH__={arch}", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    text = done.stdout
    for pattern, rewrite in ((r"\basm\s*(?:volatile\s*)?\(", _instruction), (r"__global__\s+void\b", _kernel)):
        text = _rewrite(text, pattern, rewrite)
    text = re.sub(r"__align__\(", "alignas(", text)
    text = re.sub(
        r"(?:alignas\(\d+\)\s*)?extern\s+__shared__\s+(?:alignas\(\d+\)\s*)?([\w ]+?)\s*(\w+)\[\];",
        r"\1* \2 = reinterpret_cast<\1*>(emulator::block().shared);",
        text,
    )
    return re.sub(r"__shared__\s+(?:alignas\(\d+\)\s*)?([^;]+);", _shared, text)


def _rewrite(text: str, pattern: str, rewrite: Any) -> str:
    """Replace each match by the result of `rewrite(text, match)`: the new text, and where the old one ends."""
    parts, begin = [], 0
    for match in re.finditer(pattern, text):
        if match.start() < begin:
            continue
        new, end = rewrite(text, match)
        parts += [text[begin : match.start()], new]
        begin = end
    return "".join([*parts, text[begin:]])


def _closing(text: str, begin: int) -> int:
    """The end of the parenthesis that opens at `begin`; those in strings do not count."""
    depth, quoted = 0, False
    for index in range(begin, len(text)):
        one = text[index]
        if one == '"' and text[index - 1] != "\\":
            quoted = not quoted
        depth += 0 if quoted else (one == "(") - (one == ")")
        if depth == 0:
            return index
    raise ValueError("a parenthesis that does not close")


def _split(text: str, separator: str) -> list[str]:
    """Parts between separators outside strings and brackets."""
    parts, depth, quoted = [""], 0, False
    for index, one in enumerate(text):
        if one == '"' and text[index - 1] != "\\":
            quoted = not quoted
        depth += 0 if quoted else (one in "([{<") - (one in ")]}>" and text[index - 1] != "-")
        if one == separator and depth == 0 and not quoted:
            parts.append("")
        else:
            parts[-1] += one
    return parts


def _instruction(text: str, match: re.Match[str]) -> tuple[str, int]:
    end = _closing(text, match.end() - 1)
    code, *operands = _split(text[match.end() : end], ":")
    code = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', code)).replace("\\n", "")
    names = [
        re.sub(r'^\s*"[^"]*"\s*\((.*)\)\s*$', r"\1", one, flags=re.DOTALL)
        for part in operands[:2]
        for one in _split(part, ",")
        if one.strip()
    ]
    if not code.strip():
        return "static_cast<void>(0)", end + 1
    if "st.async" in code:  # place, barrier, values and rank; the barrier is before or after the values
        barrier = next(name for name in names if "barrier" in name)
        rest = [name for name in names if name != barrier]
        return f"ptx::store_there({', '.join([rest[0], barrier, *rest[1:]])})", end + 1
    for part, call in _INSTRUCTIONS:
        if part in code:
            given = call.replace("{}", ", ".join(names)) if "{}" in call else call.format(*names)
            return f"ptx::{given}" if call else "static_cast<void>(0)", end + 1
    raise ValueError(f"the emulator does not know: {code}")


def _kernel(text: str, match: re.Match[str]) -> tuple[str, int]:
    begin, cluster, resident = match.end(), "1", "1"
    while attribute := re.compile(r"\s*(__launch_bounds__|__cluster_dims__)\s*\(").match(text, begin):
        end = _closing(text, attribute.end() - 1)
        values = _split(text[attribute.end() : end], ",")
        if attribute[1] == "__cluster_dims__":
            cluster = values[0]
        elif len(values) > 1:
            resident = values[-1]
        begin = end + 1
    body = text.index("{", _closing(text, text.index("(", begin)))
    waits = str("load_acquire" in text).lower()
    return f"void {text[begin:body]}{{ if (emulator::tells_launch({cluster}, {resident}, {waits})) return;", body + 1


def _shared(match: re.Match[str]) -> str:
    first, *others = _split(match[1], ",")
    found = re.match(r"\s*(.+?)\s+(\w+)((?:\[.*\])?)\s*$", first, re.DOTALL)
    assert found, match[0]
    names = [(found[2], found[3])]
    for other in others:
        name = re.match(r"\s*(\w+)((?:\[.*\])?)\s*$", other, re.DOTALL)
        assert name, match[0]
        names.append((name[1], name[2]))
    return " ".join(
        f"static char key_{name}; using Type_{name} = {found[1]}{size}; "
        f"auto& {name} = emulator::shared<Type_{name}>(&key_{name});"
        for name, size in names
    )


@dataclass(frozen=True)
class HostArray:
    """A NumPy array as launchers see arrays on a card."""

    values: np.ndarray

    def __getattr__(self, name: str) -> Any:
        return getattr(self.values, name)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> "HostArray":
        return HostArray(self.values[index])

    def view(self, dtype: Any) -> "HostArray":
        return HostArray(self.values.view(dtype))

    def reshape(self, *shape: int) -> "HostArray":
        return HostArray(self.values.reshape(*shape))

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.values.ctypes.data)


class EmulatedDevice:
    """A stand-in for `Device`: a launch is done when it returns. Its kernels are compiled by `compile_for`."""

    def __init__(self, folder: Path, arch: int = HOPPER) -> None:
        self.num_multiprocessors = TYPICAL_CARD.num_multiprocessors
        self.shared_bytes_per_block = TYPICAL_CARD.shared_bytes_per_block
        self.l2_bytes = TYPICAL_CARD.l2_bytes
        self.can_cluster = self.can_wgmma = arch >= HOPPER
        self.is_late = False
        self.seed = 1
        self._folder = folder
        self._arch = arch
        self._functions: dict[tuple[str, str], Any] = {}

    def compile_for(self, problems: Iterable[Problem], change: Callable[[str], str] = str) -> None:
        """Compile the kernels that the engine launches for these problems, after a change of their text."""
        solvers = [(problem.solvers[ENGINE], phantoms_of(problem)) for problem in problems]
        self.compile(lambda notes: [solve(notes, arrays) for solve, arrays in solvers], change)

    def compile(self, run: Callable[[Any], Any], change: Callable[[str], str] = str) -> None:
        """Compile the kernels that `run` launches on a device."""
        wanted: dict[str, set[str]] = {}
        notes = Notes(
            replace(
                TYPICAL_CARD,
                num_multiprocessors=self.num_multiprocessors,
                shared_bytes_per_block=self.shared_bytes_per_block,
                can_cluster=self.can_cluster,
                can_wgmma=self.can_wgmma,
            )
        )
        run(notes)
        for launch in notes.launches:
            wanted.setdefault(launch.stem, set()).add(launch.name)
        for stem, names in wanted.items():
            self._compile(stem, sorted(names), translate(change(flatten(stem)), self._arch))

    def compile_name(self, stem: str, name: str) -> None:
        """Compile a kernel, unless it is compiled."""
        if (stem, name) not in self._functions:
            self._compile(stem, [name], translate(flatten(stem), self._arch))

    def launch(self, stem: str, name: str, *, grid: Sequence[int], block: Any, **rest: Any) -> None:
        """Run a kernel. Raises: RuntimeError with what went wrong"""
        rest.pop("cost", None)
        launch = Launch(stem, name, tuple(grid), block, **rest)
        addresses = iter(addresses_of(launch.arguments))
        given = (next(addresses).to_bytes(8, "little") if one is None else one for one in bytes_of(launch))
        held = [ctypes.create_string_buffer(one, max(len(one), 8)) for one in given]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(one) for one in held))
        sizes = (*(*launch.grid, 1, 1)[:3], *launch.block_shape)
        run = self._functions[stem, name]
        card = self.is_late, self.seed, self.num_multiprocessors
        problem = run(pointers, *sizes, ctypes.c_size_t(launch.shared_bytes), *card)
        if problem is not None:
            raise RuntimeError(f"{stem}: {problem.decode()}")

    def _compile(self, stem: str, names: list[str], translated: str) -> None:
        calls = "".join(
            f'extern "C" const char* run_{index}(void** arguments, unsigned gx, unsigned gy, unsigned gz, unsigned bx, '
            "unsigned by, unsigned bz, size_t bytes, bool late, unsigned seed, unsigned multiprocessors) { "
            f"return emulator::launch(&{name}, arguments, {{gx, gy, gz}}, {{bx, by, bz}}, bytes, late, seed, "
            "multiprocessors); }\n"
            for index, name in enumerate(names)
        )
        text = f'#include "ptx.hpp"\n{translated}\n{calls}'
        source = self._folder / f"{stem.replace(chr(47), chr(45))}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.cpp"
        source.write_text(text)
        library = source.with_suffix(".so")
        _compile(str(source), "-I", _compiled_headers().name, "-shared", "-o", str(library))
        loaded = ctypes.CDLL(str(library))
        for index, name in enumerate(names):
            function = getattr(loaded, f"run_{index}")
            function.restype = ctypes.c_char_p
            self._functions[stem, name] = function


@cache
def _compiled_headers() -> TemporaryDirectory[str]:
    """The emulator itself, compiled once for all kernels of this process."""
    folder = TemporaryDirectory(prefix="emulator-")
    header = Path(folder.name, "ptx.hpp")
    header.write_text(f'#include "{HEADERS}/ptx.hpp"\n')
    _compile(str(header), "-x", "c++-header", "-o", f"{header}.gch")
    machine = f"{folder.name}/machine.so"
    _compile(f"{HEADERS}/machine.cpp", "-shared", "-o", machine)
    ctypes.CDLL(machine, ctypes.RTLD_GLOBAL)  # its functions are those that kernels call
    return folder


def _compile(*arguments: str) -> None:
    done = subprocess.run([COMPILER, *_OPTIONS, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]


def solve(device: EmulatedDevice, problem: Problem) -> dict[str, np.ndarray]:
    """The outputs of the engine's kernels. Raises: AssertionError if they change an input"""
    inputs = {name: aligned(array) for name, array in problem.inputs.items()}
    outputs = {}
    for name, one in {**problem.outputs, **problem.scratch}.items():
        start: np.ndarray = np.full(one.shape, 0, one.dtype)
        if one.initial:
            start = problem.inputs[one.initial].astype(one.dtype)
        elif not one.holds_zeros:
            start = np.frombuffer(bytes([0xFF]) * start.nbytes, start.dtype).reshape(start.shape)  # NaN
        outputs[name] = aligned(start)
    arrays = {name: HostArray(array) for name, array in {**inputs, **outputs}.items()}
    problem.solvers[ENGINE](device, arrays)  # type: ignore[arg-type]
    for name, array in inputs.items():
        assert array.tobytes() == problem.inputs[name].tobytes(), f"{name} is another"
    return outputs


def aligned(array: np.ndarray) -> np.ndarray:
    memory = np.full(array.nbytes + 512, _CANARY, np.uint8)
    begin = -memory.ctypes.data % 256
    result = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    result[...] = array
    return result
