"""Names that a wrapper of the model has put itself into, before all tensors' names or within them."""

from collections.abc import Iterable, Sequence

from llmcli.checkpoint.layout import BASE_PREFIX
from llmcli.checkpoint.safetensors_file import printable

# Parts of names, and what writes them.
_WRITERS = {
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "_forward_module": "Lightning Fabric",
    "module": "DataParallel or DeepSpeed",
    "base_model": "peft",
    "language_model": "a model for images and text",
}
_OTHER_WRITER = "a program that has the model as a part of its own"


def wrapper_of(names: Iterable[str], modules: Sequence[str]) -> str | None:
    """What stands in the names of tensors where the model's `modules` are absent, what wrote it, and the next step.

    None where the names have nothing of this kind: the modules are really absent.
    """
    wanted = [module.removeprefix(BASE_PREFIX) for module in modules]
    for name in names:
        module = name.rpartition(".")[0]
        parts = module.split(".")
        known = [part for part in parts if part in _WRITERS]
        bare = ".".join(part for part in parts if part not in _WRITERS)
        own = bare.removeprefix(BASE_PREFIX).removeprefix(BASE_PREFIX) if known else wanted[0]
        if own not in wanted:
            continue
        if module.endswith(f".{own}"):
            wrapper = module.removesuffix(own)
            if BASE_PREFIX + own in modules and wrapper.endswith(f".{BASE_PREFIX}"):
                wrapper = wrapper.removesuffix(BASE_PREFIX)
        elif known:
            wrapper = ".".join(known) + "."
        else:
            continue
        writer = _WRITERS[known[0]] if known else _OTHER_WRITER
        fix = f"save the model inside it, or remove {printable(wrapper)} from the names"
        if writer == "peft":
            fix = "merge the adapter with peft's merge_and_unload, and save that"
        return f"{printable(wrapper)} in the names of its tensors ({printable(name)}) comes from {writer}; {fix}"
    return None
