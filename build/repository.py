"""Writes a bundle's Triton model repository, ready for any Triton with the Python backend.

model_repository/{llm,engine,prefix_cache}/{config.pbtxt,1/model.py}
python/          the parts of this project the models import
native/          the CPU kernels, where they were built
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from serving.engine import native
from serving.interface import INPUTS, OUTPUTS, Tensor

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("engine_configs", "serving")
_SPARSE = "plugins/compressed_sparse_attention"
OF_PLUGINS = ("plugins/__init__.py", f"{_SPARSE}/__init__.py", f"{_SPARSE}/ref.py")

_ENGINE_INPUTS = (
    Tensor("tokens", "INT64", many=True),
    Tensor("args", "STRING"),
    Tensor("op", "STRING"),
    Tensor("states", "FP32", many=True),
)
_ENGINE_OUTPUTS = (
    Tensor("token_ids", "INT64", many=True),
    Tensor("log_probs", "FP32", many=True),
    Tensor("result", "STRING"),
    Tensor("logits", "FP32", many=True),
    Tensor("states", "FP32", many=True),
)
_CACHE_INPUTS = (Tensor("call", "STRING"), Tensor("tokens", "INT64", many=True))
_CACHE_OUTPUTS = (
    Tensor("reply", "STRING"),
    Tensor("blocks", "INT64", many=True),
    Tensor("generations", "UINT64", many=True),
)


def write_repository(
    bundle: Path, parameters: dict[str, dict[str, str]], engine_kind: str = "KIND_CPU"
) -> None:
    """``parameters``: config.pbtxt parameters by model (see EngineConfig, CacheConfig);
    ``engine_kind``: where the engine runs, KIND_CPU or KIND_GPU."""
    models = {
        "llm": (INPUTS, OUTPUTS, True),
        "engine": (_ENGINE_INPUTS, _ENGINE_OUTPUTS, True),
        "prefix_cache": (_CACHE_INPUTS, _CACHE_OUTPUTS, False),
    }
    for name, (inputs, outputs, decoupled) in models.items():
        folder = bundle / "model_repository" / name
        (folder / "1").mkdir(parents=True)
        source = ROOT / "serving" / "model_repository" / name / "model.py"
        shutil.copyfile(source, folder / "1" / "model.py")
        kind = engine_kind if name == "engine" else "KIND_CPU"
        text = config_pbtxt(name, inputs, outputs, decoupled, parameters.get(name, {}), kind)
        (folder / "config.pbtxt").write_text(text)
    if built := native.library():
        (bundle / native.LIBRARY).parent.mkdir()
        shutil.copyfile(built, bundle / native.LIBRARY)
    for package in PACKAGES:
        _copy_python(ROOT / package, bundle / "python" / package)
    for name in OF_PLUGINS:
        (bundle / "python" / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / name, bundle / "python" / name)


def config_pbtxt(
    name: str,
    inputs: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
    decoupled: bool,
    parameters: dict[str, str],
    kind: str = "KIND_CPU",
) -> str:
    """One instance each: the models keep state of their own. Every input may be absent."""
    lines = [f'name: "{name}"', 'backend: "python"', "max_batch_size: 0"]
    if decoupled:
        lines.append("model_transaction_policy { decoupled: true }")
    lines.append(_tensors("input", inputs, " optional: true"))
    lines.append(_tensors("output", outputs, ""))
    lines.append(f"instance_group [ {{ count: 1 kind: {kind} }} ]")
    for key, value in parameters.items():
        quoted = json.dumps(value, ensure_ascii=False)
        lines.append(f'parameters {{ key: "{key}" value {{ string_value: {quoted} }} }}')
    return "\n".join(lines) + "\n"


def _tensors(side: str, tensors: tuple[Tensor, ...], extra: str) -> str:
    rows = [
        f'  {{ name: "{t.name}" data_type: TYPE_{t.kind} dims: [ {-1 if t.many else 1} ]{extra} }}'
        for t in tensors
    ]
    return f"{side} [\n" + ",\n".join(rows) + "\n]"


def _copy_python(source: Path, target: Path) -> None:
    """Python and values only: no weights, no caches."""
    for file in sorted([*source.rglob("*.py"), *source.rglob("*.toml")]):
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
