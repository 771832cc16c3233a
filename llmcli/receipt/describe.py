"""From a run to its receipt, and from a receipt to the sampler that it describes.

A receipt has token ids and resolved settings, not flags. So if a default, a preset or a generation_config.json has
changed since, a replay names it, and the text stays the same.
"""

import hashlib
import os
import platform
import queue
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli import __version__
from llmcli.checkpoint.folder import CONFIG_NAME, GENERATION_CONFIG_NAME, INDEX_NAME, WEIGHTS_NAME, FileState
from llmcli.checkpoint.model import Model
from llmcli.errors import CheckpointError, UsageError
from llmcli.kernels.environment import card_libraries, driver_version, find_driver
from llmcli.kernels.sources import sources_digest
from llmcli.reading import CHAT_TEMPLATE
from llmcli.receipt import receipt as facts
from llmcli.runners.base import Arithmetic
from llmcli.sampling.params import SPECS, Sampler, SamplingParams

if TYPE_CHECKING:
    from llmcli.engine.request import Finished, Request
    from llmcli.runners.base import Runner


# What computes a text on this machine: versions of the program and its libraries, processor, system and card.

# Libraries choose their code by these: other instructions round differently.
_INSTRUCTIONS = frozenset(
    {"avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"}
    | {"avx_vnni", "amx_int8", "amx_bf16", "asimd", "asimddp", "asimdhp", "bf16", "i8mm", "sve", "sve2"}
)
# These overrule that choice, or change how products are rounded.
_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NPY_DISABLE_CPU_FEATURES",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
)
_CPU_INFO = Path("/proc/cpuinfo")
_CUPY = "cupy"


def describe_program(arithmetic: Arithmetic, others: Iterable[str]) -> dict[str, str]:
    """Versions of llmcli, Python, the packages that compute and `others`, and digests of sources that compute.

    `kernels` stands for llmcli's own files; each kernel of the user's has its own line, so that a replay names it.
    """
    versions = {"llmcli": __version__, "Python": f"{platform.python_implementation()} {platform.python_version()}"}
    for name in sorted({"numpy", *arithmetic.libraries, *others}):
        if name == _CUPY:  # its packages have other names, and bring others along
            versions |= card_libraries() | {"kernels": f"sha256 {sources_digest()}"}
        else:
            versions[name] = _version(name)
    versions |= {f"kernels/cpu/{stem}.cpp": f"sha256 {digest}" for stem, digest in arithmetic.cpu_sources.items()}
    return versions | {f"kernel {stem}": f"sha256 {digest}" for stem, digest in arithmetic.own_kernels.items()}


def describe_machine(card: int | None) -> dict[str, str]:
    """The system, the processor, variables that change how libraries round; and a card, by the driver's number."""
    processor, instructions = _processor()
    described = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor,
        "instructions": " ".join(instructions),
        **{f"variable {name}": os.environ[name] for name in _VARIABLES if name in os.environ},
    }
    driver = None if card is None else find_driver()
    if card is not None and driver is not None and card < len(driver.cards):
        found = driver.cards[card]
        described |= {
            "card": found.name,
            "compute capability": "{}.{}".format(*found.compute_capability),
            "driver": driver_version() or "unknown",
            "driver's CUDA": "{}.{}".format(*driver.cuda_version),
        }
    return described


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def _processor() -> tuple[str, list[str]]:
    """The processor's name, and the instruction sets that matter, if the system reports them."""
    try:
        text = _CPU_INFO.read_text(errors="replace")
    except OSError:
        text = ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    known = _INSTRUCTIONS.intersection(flags[1].split()) if flags else frozenset()
    return name[1].strip() if name else platform.processor() or "unknown", sorted(known)


# The files of a model that a text depends on.

TOKENIZER_NAMES = ("tokenizer.json", "tokenizer.model")  # the first that exists is read
_SETTINGS_NAMES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_TEMPLATE_NAME = "chat_template.jinja"
_COMMIT = re.compile("[0-9a-f]{40}")


def model_files(model: Model, *, with_template: bool) -> dict[str, Path]:
    """The files by name: config, weights and their index, tokenizer, the chat template if it is used, adapters."""
    folder = model.checkpoint.folder
    weights = sorted({info.path for info in model.checkpoint.tensors.values()})
    names = [CONFIG_NAME, GENERATION_CONFIG_NAME]
    if not (folder / WEIGHTS_NAME).exists():
        names.append(INDEX_NAME)
    names += [name for name in TOKENIZER_NAMES if (folder / name).exists()][:1]
    names += _SETTINGS_NAMES
    if with_template:
        names.append(_TEMPLATE_NAME)
    files = {name: folder / name for name in names if (folder / name).exists()}
    files |= {path.name: path for path in weights}
    for number, adapter in enumerate(model.adapters, 1):
        files |= {f"adapter {number} {path.name}": path for path in adapter.files}
    return files


def commit_of(folder: Path) -> str | None:
    """The commit of a folder in the hub's cache, None for any other folder."""
    is_snapshot = folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--")
    return folder.name if is_snapshot and _COMMIT.fullmatch(folder.name) else None


# The SHA-256 of a model's files, computed by threads while other work goes on.
#
# Always from the content: a file's name in the hub's cache says what was downloaded, not what is there now. A file that
# changes before the end is refused.

_CHUNK_BYTES = 2**20
_MOST_THREADS = 4
_PATIENCE_SECONDS = 0.1  # between two looks at the progress

OnProgress = Callable[[int, int], None]  # bytes read so far, bytes in all


class FileDigests:
    """Files by name. Their state is noted when this is made, which should be before anybody reads them.

    Raises: CheckpointError for a missing file.
    """

    def __init__(self, files: Mapping[str, Path]):
        self._files = files
        self._states = {name: _state(path) for name, path in files.items()}
        self._total = sum(state.size for state in self._states.values())
        self._waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[str, str | CheckpointError]] = queue.SimpleQueue()
        self._num_read = 0
        self._lock = threading.Lock()
        self._has_ended = False

    def start(self) -> None:
        """Begin to read."""
        # The largest first, so that none begins late.
        for name in sorted(self._states, key=lambda name: -self._states[name].size):
            self._waiting.put(name)
        for _ in range(min(_MOST_THREADS, len(self._files), os.cpu_count() or 1)):
            # Daemons: a program that ends early does not wait for them.
            threading.Thread(target=self._work, name="digests", daemon=True).start()

    def stop(self) -> None:
        """End without a result."""
        self._has_ended = True

    def wait(self, on_progress: OnProgress) -> dict[str, facts.FileFacts]:
        """Wait for the end.

        Raises: CheckpointError for a file that cannot be read, or has changed since this was made.
        """
        found: dict[str, str] = {}
        while len(found) < len(self._files):
            on_progress(self._num_read, self._total)
            try:
                name, result = self._results.get(timeout=_PATIENCE_SECONDS)
            except queue.Empty:
                continue
            if isinstance(result, CheckpointError):
                self.stop()
                raise result
            found[name] = result
        for name, path in self._files.items():
            if _state(path) != self._states[name]:
                raise CheckpointError(f"{path} changed while the model ran; run again once it no longer changes")
        return {name: facts.FileFacts(self._states[name].size, found[name]) for name in self._files}

    def _work(self) -> None:
        while not self._has_ended:
            try:
                name = self._waiting.get_nowait()
            except queue.Empty:
                return
            try:
                self._results.put((name, self._digest(self._files[name])))
            except OSError as error:
                self._results.put((name, CheckpointError(f"{self._files[name]} cannot be read: {error.strerror}")))

    def _digest(self, path: Path) -> str:
        """Reading and hashing both let other threads run."""
        digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES))
        # Not blocking: a pipe may have replaced the file since.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        with open(os.open(path, flags), "rb", buffering=0) as file:
            while not self._has_ended and (count := file.readinto(buffer)):
                digest.update(buffer[:count])
                with self._lock:
                    self._num_read += count
        return digest.hexdigest()


def _state(path: Path) -> FileState:
    try:
        info = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return FileState(info.st_size, info.st_mtime_ns, info.st_ino)


TEMPLATE_FILE = "--chat-template"  # its name among the model's files


def look_at_files(model: Model, prompt: facts.PromptFacts) -> FileDigests:
    """The digests of the files that a text depends on, as they are now; call it before the weights are read.

    Raises: CheckpointError.
    """
    choice = prompt.chat_template
    files = model_files(model, with_template=prompt.chat and choice is None)
    # `plain` is not a file, and a value that is too long is not a template.
    if choice is not None and os.path.isfile(choice) and os.path.getsize(choice) <= CHAT_TEMPLATE.max_bytes:
        files[TEMPLATE_FILE] = Path(choice)
    return FileDigests(files)


def describe_run(
    name: str,
    model: Model,
    runner: "Runner",
    card: int | None,
    prompt: facts.PromptFacts,
    request: "Request",
    files: Mapping[str, facts.FileFacts],
    samples: tuple[facts.SampleFacts, ...],
) -> facts.Receipt:
    """The receipt of a run of `model`, called `name` on the command line, on a card or, without one, the CPU."""
    arithmetic = runner.arithmetic
    text_libraries = ["tokenizers" if "tokenizer.json" in files else "sentencepiece"]
    if prompt.chat:
        text_libraries.append("jinja2")
    adapters = tuple(facts.AdapterFacts(one.name, commit_of(one.folder), one.weight) for one in model.adapters)
    schema = None
    if request.schema is not None:
        text_libraries.append("llguidance")
        schema = facts.SchemaFacts(request.schema.grammar.name, request.schema.grammar.lark)
    return facts.Receipt(
        model=facts.ModelFacts(name, commit_of(model.checkpoint.folder), files, adapters),
        program=describe_program(arithmetic, text_libraries),
        machine=describe_machine(card),
        runner=facts.RunnerFacts(
            description=runner.description,
            device="cpu" if card is None else f"cuda:{card}",
            dtype=arithmetic.dtype,
            kv_cache=arithmetic.kv_cache,
            threads=arithmetic.num_threads,
            context=runner.limits.max_seq_len,
        ),
        prompt=prompt,
        sampling=_sampling(request.sampler),
        stopping=facts.StoppingFacts(request.max_new_tokens, request.stop_strings, request.at_start),
        samples=samples,
        schema=schema,
    )


def describe_samples(finished: "Sequence[Finished]") -> tuple[facts.SampleFacts, ...]:
    """The texts that have ended."""
    return tuple(
        facts.SampleFacts(item.sample + 1, item.token_ids, item.text, item.finish_reason)
        for item in finished
        if item.finish_reason != "interrupted"
    )


def sampler_of(receipt: facts.Receipt) -> Sampler:
    """The sampler that a receipt describes.

    Raises: UsageError for parameters, an order or biases that no sampler accepts.
    """
    sampling = receipt.sampling
    return Sampler(
        _params(sampling.parameters),
        seed=sampling.seed,
        num_prompt_tokens=len(receipt.prompt.token_ids),
        eos_token_ids=frozenset(sampling.eos_token_ids),
        ignore_eos=sampling.ignore_eos,
        logit_bias=dict(sampling.logit_bias),
        sequence_bias=sampling.sequence_bias,
        begin_suppress_token_ids=frozenset(sampling.begin_suppress_token_ids),
        forced_eos_token_ids=frozenset(sampling.forced_eos_token_ids),
        dry_breaker_token_ids=frozenset(sampling.dry_breaker_token_ids),
        order=sampling.order,
    )


def _params(parameters: Mapping[str, float]) -> SamplingParams:
    if odd := sorted(parameters.keys() ^ SPECS.keys()):
        what = "unknown" if odd[0] in parameters else "missing"
        raise UsageError(f"sampling.parameters.{odd[0]:.60} is {what}, expected {', '.join(SPECS)}")
    values: dict[str, Any] = dict(parameters)
    return SamplingParams(**values)


def _sampling(sampler: Sampler) -> facts.SamplingFacts:
    return facts.SamplingFacts(
        seed=sampler.seed,
        parameters=dict(vars(sampler.params)),
        order=sampler.order,
        ignore_eos=sampler.ignore_eos,
        eos_token_ids=tuple(sorted(sampler.eos_token_ids)),
        logit_bias=tuple(sorted(sampler.logit_bias.items())),
        sequence_bias=sampler.sequence_bias,
        begin_suppress_token_ids=tuple(sorted(sampler.begin_suppress_token_ids)),
        forced_eos_token_ids=tuple(sorted(sampler.forced_eos_token_ids)),
        dry_breaker_token_ids=tuple(sorted(sampler.dry_breaker_token_ids)),
    )
