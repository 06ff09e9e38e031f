"""Builds engine/model.engine from model.onnx, on the machine whose GPU will run it.

Needs TensorRT's Python package (10.14 or later) and the plugin library; nothing of the project.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LIBRARY = "libhybrid_tensorrt.so"
# TensorRT counts the values of a tensor in 32 bits: a pool must stay below.
MOST_VALUES = 2**31 - 1

Range = tuple[int, int, int]


def shape_ranges(
    manifest: Mapping[str, Any], profile: Mapping[str, Any], inputs: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """(min, opt, max) shape of every input in one profile.

    inputs: declared shapes, -1 where a size varies. What -1 means follows from the name.
    """
    engine = manifest["engine"]
    most_blocks = -(-engine["max_seq_len"] // engine["block_tokens"])
    pools = [shape for name, shape in inputs.items() if "_pool_" in name]
    page_values = max((s[1] * s[2] * s[3] for s in pools), default=1)
    batch, tokens, logits = (tuple(profile[k]) for k in ("batch", "tokens", "logits"))
    blocks: Range = (1, min(256, most_blocks), most_blocks)
    pages: Range = (2, min(4096, MOST_VALUES // page_values), MOST_VALUES // page_values)
    by_name: dict[str, tuple[Range, ...]] = {
        "input_ids": (batch, tokens),
        "position_ids": (batch, tokens),
        "block_table": (batch, blocks),
        "logit_rows": (logits,),
        "kv_append": ((1, 1, 1),),
    }
    ranges = {}
    for name, shape in inputs.items():
        first = pages if "_pool_" in name else batch
        given = by_name.get(name, (first,))
        sizes = [*given, *((n, n, n) for n in shape[len(given) :])]
        ranges[name] = tuple(tuple(size[k] for size in sizes) for k in range(3))
    return ranges


def build(arguments: argparse.Namespace) -> Path:
    """Parse, configure, build, write. Exits with TensorRT's own message where it refuses."""
    trt = importlib.import_module("tensorrt")

    logger = trt.Logger(trt.Logger.VERBOSE if arguments.verbose else trt.Logger.INFO)
    trt.get_plugin_registry().load_library(str(arguments.plugins))
    builder = trt.Builder(logger)
    typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)  # the rule in 11
    network = builder.create_network(0 if typed is None else 1 << int(typed))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(HERE / "model.onnx")):
        sys.exit("\n".join(str(parser.get_error(i)) for i in range(parser.num_errors)))

    manifest = json.loads((HERE / "manifest.json").read_text())
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, arguments.workspace_gib << 30)
    config.clear_flag(trt.BuilderFlag.TF32)  # what is left in fp32 is so on purpose
    aliased = getattr(trt.PreviewFeature, "ALIASED_PLUGIN_IO_10_03", None)
    if aliased is not None and arguments.alias:  # pools and states are updated in place
        config.set_preview_feature(aliased, True)
    cache_file = arguments.timing_cache
    known = cache_file.read_bytes() if cache_file.exists() else b""
    cache = config.create_timing_cache(known)
    config.set_timing_cache(cache, False)

    tensors = [network.get_input(i) for i in range(network.num_inputs)]
    declared = {t.name: tuple(t.shape) for t in tensors}
    for table in manifest["engine"]["profiles"]:
        profile = builder.create_optimization_profile()
        for name, shapes in shape_ranges(manifest, table, declared).items():
            profile.set_shape(name, *shapes)
        config.add_optimization_profile(profile)

    started = time.monotonic()
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        sys.exit("TensorRT built no engine; its log says why")
    engine = HERE / "engine" / "model.engine"
    engine.parent.mkdir(exist_ok=True)
    engine.write_bytes(plan)
    cache_file.write_bytes(config.get_timing_cache().serialize())
    size = engine.stat().st_size / 2**30
    print(f"{engine}: {size:.2f} GiB in {time.monotonic() - started:.0f} s")
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plugins", type=Path, default=HERE / "plugins" / LIBRARY)
    parser.add_argument("--timing-cache", type=Path, default=HERE / "timing.cache")
    parser.add_argument("--workspace-gib", type=int, default=8)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument(
        "--no-alias",
        dest="alias",
        action="store_false",
        help="do not tell TensorRT that outputs lie where inputs do (the caller binds them so in "
        "either case): if it copies pools, which its profile shows, this avoids it",
    )
    arguments = parser.parse_args()
    if not arguments.plugins.is_file():
        sys.exit(f"{arguments.plugins} is missing: make plugins-tensorrt builds it")
    build(arguments)


if __name__ == "__main__":
    main()
