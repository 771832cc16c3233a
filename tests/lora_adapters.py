"""Writes LoRA adapters in peft's layout without peft, which takes seconds to import."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "org/base",
    "r": 4,
    "lora_alpha": 8,
    "bias": "none",
    "target_modules": ["q_proj", "down_proj"],
}


def write_lora(
    folder: Path, shapes: dict[str, tuple[int, int]], *, seed: int = 0, size: float = 0.5, **overrides: Any
) -> Path:
    """An adapter of rank 4 of the layers in `shapes`, which are [output_size, input_size] by module name."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (num_outputs, num_inputs) in shapes.items():
        prefix = f"base_model.model.{module}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn((4, num_inputs), generator=generator) * size
        tensors[f"{prefix}.lora_B.weight"] = torch.randn((num_outputs, 4), generator=generator) * size
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **overrides}))
    return folder


def layer_shapes(num_layers: int, hidden_size: int, intermediate_size: int) -> dict[str, tuple[int, int]]:
    """The layers that CONFIG targets."""
    shapes = {}
    for index in range(num_layers):
        shapes[f"model.layers.{index}.self_attn.q_proj"] = (hidden_size, hidden_size)
        shapes[f"model.layers.{index}.mlp.down_proj"] = (hidden_size, intermediate_size)
    return shapes
