"""Tiny quantized models: the schemes that runners must compute, and their export."""

from pathlib import Path

from llmcli.checkpoint.export import Exporter
from llmcli.checkpoint.export_plan import plan_export
from llmcli.checkpoint.model import open_model
from llmcli.quantization.schemes import ExportOptions, WeightScheme

SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8, "vocab_size": 288}
SCHEMES = {
    "int8 channel": WeightScheme(8, None),
    "int8 groups of 32": WeightScheme(8, 32),
    "int8 groups of 128": WeightScheme(8, 128),
    "int4 channel": WeightScheme(4, None),
    "int4 groups of 64": WeightScheme(4, 64),
    "int4 groups of 128": WeightScheme(4, 128),
    "int4 groups of 64, asymmetric": WeightScheme(4, 64, is_symmetric=False),
    "int4 channel, asymmetric": WeightScheme(4, None, is_symmetric=False),
}


def export(folder: Path, destination: Path, options: ExportOptions) -> Path:
    exporter = Exporter(plan_export(open_model(folder), options), destination, "tiny")
    exporter.run(exporter.prepare(), lambda done, total: None, lambda name, quality: None)
    return destination
