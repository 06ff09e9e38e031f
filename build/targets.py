"""What a model can be converted for: a table of targets, one row each.

To add a target, write ``write(options, weights, folder, progress)`` and a row.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from build.half import HALF_DTYPES
from build.pipeline import (
    Options,
    Progress,
    WeightSet,
    convert,
    copy_tokenizer,
    new_manifest,
    weights_of,
    write_manifest,
)
from build.plan import gpu_plan_table, plan_table
from build.quantize import DTYPES
from build.store import atomic_directory
from engine_configs.errors import ConversionError
from engine_configs.names import Dtypes
from engine_configs.spec import HybridSpec
from serving.engine.bundle import Bundle

# Fills ``folder`` (tokenizer files are there already) and returns what the manifest says of it
# beside what it says of every target; must hold "digest". Raises HybridServeError.
Write = Callable[[Options, WeightSet, Path, Progress], dict[str, Any]]
# (name, spec, dtype, memory in GiB) → the table that --plan prints.
Plan = Callable[[str, HybridSpec, str, float], Table]


@dataclass(frozen=True)
class Target:
    """One thing to convert for; the first lowering is the default."""

    convert: Callable[[Options, Progress], Bundle]
    plan: Plan
    device: Literal["cpu", "gpu"]
    dtypes: tuple[str, ...]
    lowerings: tuple[str, ...]

    def default_dtype(self, known: Dtypes, lowering: str) -> str:
        """The model's own for this kind of device; fp32 in the portable lowering."""
        return "fp32" if lowering == "standard" else getattr(known, self.device)


def _tree(write: Write) -> Callable[[Options, Progress], Bundle]:
    """``options.output`` appears whole or not at all, with a manifest and a tokenizer."""

    def run(options: Options, progress: Progress) -> Bundle:
        with atomic_directory(options.output) as folder:
            copy_tokenizer(options, folder)
            found = write(options, weights_of(options), folder, progress)
            manifest = new_manifest(options, found.pop("digest"), folder)
            write_manifest(manifest | found, folder)
        return Bundle.open(options.output)

    return run


def _module(name: str) -> Write:
    """``write`` of a module that is only loaded when it is used."""

    def write(
        options: Options, weights: WeightSet, folder: Path, progress: Progress
    ) -> dict[str, Any]:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as e:
            raise ConversionError(
                f"this target needs {e.name}, which is missing", where=options.target
            ) from None
        found: dict[str, Any] = module.write(options, weights, folder, progress)
        return found

    return write


TARGETS = {
    "onnx": Target(
        convert,
        lambda name, spec, _, memory: plan_table(name, spec, memory),
        device="cpu",
        dtypes=DTYPES,
        lowerings=("ort", "standard"),
    ),
    "tensorrt": Target(
        _tree(_module("build.tensorrt")),
        gpu_plan_table,
        device="gpu",
        dtypes=HALF_DTYPES,
        lowerings=("tensorrt",),
    ),
    "tensorrt-llm": Target(
        _tree(_module("build.tensorrt_llm")),
        gpu_plan_table,
        device="gpu",
        dtypes=HALF_DTYPES,
        lowerings=("torch",),  # no graph: the model runs in PyTorch
    ),
}
