"""A model as a tree for TensorRT-LLM's PyTorch backend (there are no engine files any more).

config.json, model-*.safetensors, tokenizer   Hugging Face layout; the folder to serve
llm_args.yaml                                 LLM() arguments, checked by llm_args.py
python/hybrid_trtllm/                         the out-of-tree package, and what it imports
triton/tensorrt_llm/                          model directory for Triton (llmapi)
requirements/tensorrt-llm.txt, README.md
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from build.calibrate import import_calibration
from build.pipeline import Options, Progress, WeightSet
from engine_configs.spec import HybridSpec
from serving.replay.calibration import UNCALIBRATED, Calibration

from .llm_args import LlmArgs, ModelYaml, to_yaml
from .package.model import matrix, require_supported
from .package.settings import ARCHITECTURE, MODEL_TYPE, Settings
from .readme import readme

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(__file__).parent / "package"
# What the package imports; values beside code are *.toml.
IMPORTED = (
    "engine_configs/**/*.py",
    "engine_configs/**/*.toml",
    "plugins/__init__.py",
    "plugins/aot.py",
    *(
        f"plugins/{op}/{file}.py"
        for op in ("linear_state_replay", "compressed_sparse_attention")
        for file in ("__init__", "ref", "kernel", "torch_op")
    ),
    "serving/__init__.py",
    "serving/prefix_cache/*.py",
    "serving/replay/*.py",
)
SHARD_BYTES = 2 << 30
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LONGEST = 32768  # max_seq_len where the model allows more; it sizes buffers


def write(options: Options, weights: WeightSet, folder: Path, progress: Progress) -> dict[str, Any]:
    """Fill ``folder``; tokenizer files are there already. Returns what the manifest adds.

    Raises UnsupportedModelError for a mixer with no PyTorch form, CheckpointError, ConfigError.
    """
    spec = options.family.spec
    require_supported(spec)
    calibration = UNCALIBRATED
    if options.import_calibration:
        calibration = import_calibration(options.import_calibration)
    settings = Settings.of(spec, calibration)
    digest = write_weights(spec, weights, DTYPES[options.dtype], folder, progress)
    (folder / "config.json").write_text(json.dumps(config(settings, options.dtype), indent=1))
    write_arguments(spec, options.dtype, folder)
    copy_package(folder / "python")
    (folder / "requirements").mkdir()
    shutil.copyfile(ROOT / "requirements" / "tensorrt-llm.txt",
                    folder / "requirements" / "tensorrt-llm.txt")  # fmt: skip
    (folder / "README.md").write_text(readme(options, settings))
    return {
        "digest": digest,
        "calibration": calibration.to_json(),
        "skipped": _skipped(calibration),
    }


def _skipped(calibration: Calibration) -> dict[str, str]:
    skipped = {"execution": "TensorRT-LLM needs a GPU: nothing here ran it; see README.md"}
    if not calibration.known:
        skipped["calibration"] = "give --import-calibration; until then hits are exact ones only"
    return skipped


def write_weights(
    spec: HybridSpec, weights: WeightSet, dtype: torch.dtype, folder: Path, progress: Progress
) -> str:
    """Matrices in ``dtype``, everything small in fp32, a shard in memory at a time; the digest."""
    kinds = {n: dtype if matrix(n, s) else torch.float32 for n, s in weights.shapes.items()}
    shards = plan_shards({
        n: torch.Size(s).numel() * kinds[n].itemsize for n, s in weights.shapes.items()
    })  # fmt: skip
    running, index = hashlib.blake2b(digest_size=16), dict[str, str]()
    with progress.stage("weights", len(kinds)) as advance:
        for number, names in enumerate(shards, 1):
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
            tensors = {}
            for name in names:
                tensors[name] = torch.from_numpy(weights.read(name)).to(kinds[name]).contiguous()
                raw = tensors[name].flatten().view(torch.uint8).numpy().tobytes()
                running.update(name.encode() + hashlib.blake2b(raw, digest_size=16).digest())
                index[name] = file
                advance()
            save_file(tensors, folder / file, metadata={"format": "pt"})
    total = sum((folder / f).stat().st_size for f in set(index.values()))
    table = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(table, indent=1))
    spec_text = json.dumps(spec.to_json(), sort_keys=True)
    return hashlib.sha256(f"tensorrt-llm{spec_text}{running.hexdigest()}".encode()).hexdigest()


def plan_shards(sizes: dict[str, int], limit: int = SHARD_BYTES) -> list[list[str]]:
    """Names in order, in as few files of at most ``limit`` bytes as that allows."""
    shards, used = [list[str]()], 0
    for name, size in sizes.items():
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def config(settings: Settings, dtype: str) -> dict[str, Any]:
    """What TensorRT-LLM itself looks at, and the spec for the package."""
    spec = settings.spec
    attention = spec.attention_layers()[0][1]
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "torch_dtype": str(DTYPES[dtype]).removeprefix("torch."),
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "max_position_embeddings": spec.max_position,
        # TensorRT-LLM would look for an embedding of its own; load_weights fills its head instead.
        "tie_word_embeddings": False,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": list(spec.eos_token_ids),
        "hybrid_serve": settings.to_json(),
    }


def write_arguments(spec: HybridSpec, dtype: str, folder: Path) -> None:
    """llm_args.yaml, and the same with the model's path for Triton."""
    kind = str(DTYPES[dtype]).removeprefix("torch.")
    longest = min(spec.max_position, LONGEST)
    arguments = LlmArgs.model_validate({"dtype": kind, "max_seq_len": longest})
    (folder / "llm_args.yaml").write_text(to_yaml(arguments))
    model = folder / "triton" / "tensorrt_llm"
    (model / "1").mkdir(parents=True)
    yaml = ModelYaml.model_validate(arguments.model_dump() | {"model": "../../.."})
    (model / "1" / "model.yaml").write_text(to_yaml(yaml))
    source = Path(__file__).parent / "triton"
    shutil.copyfile(source / "model.py", model / "1" / "model.py")
    shutil.copyfile(source / "config.pbtxt", model / "config.pbtxt")


def copy_package(target: Path) -> None:
    """The package under its own name, beside the parts of this project that it imports."""
    files = {f: target / "hybrid_trtllm" / f.name for f in PACKAGE.glob("*.py")}
    files |= {f: target / f.relative_to(ROOT) for p in IMPORTED for f in ROOT.glob(p)}
    for file, copy in sorted(files.items()):
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
