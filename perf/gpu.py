"""``python -m perf.gpu``: our kernels on one GPU. Needs torch and Triton-lang, at most 8 minutes.

Three parts, each printed and saved as soon as it is done, until the time is up:

    numerics  every kernel at real shapes against float64 (what ref.py means, in torch)
    kernels   times over their floors: operations at the speed of a matmul, bytes at that of a copy,
              both measured in the same run
    ttft      time to first token of random hybrids in the shapes of published 7B-9B models: cold;
              a hit with the paper's 5 % zero-start tail; a split hit (slow units from a checkpoint,
              320 tokens replayed: half an interval of 512 and r_min 64); each with the K/V already
              on the GPU and copied from pinned host memory under the replay

``TRITON_INTERPRET=1 python -m perf.gpu --small`` runs all of it on a CPU at toy sizes, as a test.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from engine_configs.families import read_family
from engine_configs.families.config import ConfigReader
from engine_configs.names import find_model
from engine_configs.spec import HybridSpec
from perf.gpu_bench import Bench, measure_floors, show
from perf.gpu_kernels import kernels, numerics, sparse
from perf.gpu_model import Model

RESULTS = Path(__file__).parent / "results" / "gpu.json"
MODELS = ("qwen3.5-9b", "hybrid-7b", "nemotron-h-8b")
SUFFIX, SPLIT_TOKENS, RATIO, CHUNK = 64, 320, 0.05, 8192
_TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
SMALL_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3.5-9b": {
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, **_TWO_LAYERS,
    },
    "hybrid-7b": {
        "num_attention_heads": 2, "num_key_value_heads": 2, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_key_head_dim": 24, "linear_value_head_dim": 48,
        **_TWO_LAYERS,
    },
    "nemotron-h-8b": {
        "num_attention_heads": 2, "num_key_value_heads": 1, "attention_head_dim": 16,
        "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1,
        "num_hidden_layers": 3, "hybrid_override_pattern": "M*-",
    },
}  # fmt: skip


def spec_of(name: str, small: bool) -> HybridSpec:
    model = find_model(name)
    if not small:
        return model.family().spec
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96}
    config = {**model.config, **sizes, **SMALL_CONFIGS[name]}
    return read_family(ConfigReader(config, f"{name}, small")).spec


class HostKv:
    """K/V of a prefix in pinned memory: one layer's, copied for each of them."""

    def __init__(self, model: Model, prefix: int) -> None:
        self.model, pages = model, -(-prefix // 32)
        self.pools = [layer.pools for layer in model.attention_layers() if layer.pools]
        self.pages = pages
        rows = self.pools[0][0][:pages]
        pin = rows.is_cuda
        self.host = [torch.zeros(rows.shape, dtype=rows.dtype, pin_memory=pin) for _ in range(2)]
        self.stream = torch.cuda.Stream() if pin else None
        self.events: list[torch.cuda.Event] = []

    def start(self) -> None:
        """Begin copying all layers, in order, beside what runs."""
        self.events = []
        if self.stream is None:
            for pools in self.pools:
                self._copy(pools)
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for pools in self.pools:
                self._copy(pools)
                event = torch.cuda.Event()
                event.record()
                self.events.append(event)

    def wait(self, layer: int) -> None:
        if self.events:
            torch.cuda.current_stream().wait_event(self.events[layer])

    def _copy(self, pools: tuple[torch.Tensor, torch.Tensor]) -> None:
        for pool, host in zip(pools, self.host, strict=True):
            pool[: self.pages].copy_(host, non_blocking=True)


def prefill(model: Model, tokens: torch.Tensor, start: int, chunk: int) -> torch.Tensor:
    """Append tokens [T] from position ``start`` on; the last runs by itself: its logits [V]."""
    for first in range(0, len(tokens) - 1, chunk):
        part = tokens[first : min(first + chunk, len(tokens) - 1)]
        model.run(part, start + first + len(part), append=True)
    return model.run(tokens[-1:], start + len(tokens), append=True)


def hit(
    model: Model, tokens: torch.Tensor, prefix: int, replayed: int, chunk: int, host: HostKv | None
) -> torch.Tensor:
    """Replay the last tokens of the prefix from zero states, then run the suffix: logits [V].

    A split hit costs the same from its few slow units (megabytes, whose load is not counted)."""
    model.reset()
    if host:
        host.start()
    wait = host.wait if host else lambda _: None
    for first in range(prefix - replayed, prefix, chunk):
        part = tokens[first : min(first + chunk, prefix)]
        model.run(part, first + len(part), append=False, ready=wait)
    return prefill(model, tokens[prefix:], prefix, chunk)


def ttft(bench: Bench) -> None:
    """The three models in turn, each with its share of the time that is left."""
    lengths = (64,) if bench.small else (8192, 16384, 32768, 65536)
    suffix = 5 if bench.small else SUFFIX
    for i, name in enumerate(MODELS):
        until = bench.left() * (1 - 1 / (len(MODELS) - i))
        spec = spec_of(name, bench.small)
        layers = fitting_layers(bench, spec, max(lengths) + suffix)
        model = Model(spec, bench.device, max(lengths) + suffix, layers)
        tokens = torch.randint(spec.vocab_size, (max(lengths) + suffix,), device=bench.device)
        if not bench.small:  # compile the kernels
            hit(model, tokens[: 1024 + suffix], 1024, SPLIT_TOKENS, CHUNK, None)
        for prefix in lengths:
            if bench.left() < until or bench.left() < 5:
                bench.skip(f"ttft of {name} at {prefix}")
                continue
            times = hits(bench, model, tokens[: prefix + suffix], prefix)
            for method, (run, seconds) in times.items():
                bench.add("ttft", {
                    "model": name, "layers": f"{layers}/{len(spec.layers)}", "prefix": prefix,
                    "method": method, "tokens_run": run + suffix, "ms": seconds * 1e3,
                    "cold_over": times["cold"][1] / seconds,
                })  # fmt: skip
        del model
        if bench.device == "cuda":
            torch.cuda.empty_cache()


def hits(
    bench: Bench, model: Model, prompt: torch.Tensor, prefix: int
) -> dict[str, tuple[int, float]]:
    """By method: tokens of the prefix that ran, seconds to the first token."""
    chunk, split = (48, 20) if bench.small else (CHUNK, SPLIT_TOKENS)

    def cold() -> None:
        model.reset()
        prefill(model, prompt, 0, chunk)

    found = {"cold": (prefix, bench.time(cold, 1))}
    host = HostKv(model, prefix)
    for method, replayed in (("5% replay", int(RATIO * prefix)), ("split", split)):
        for where, kv in (("", None), (" + K/V copy", host)):
            seconds = bench.time(
                lambda n=replayed, kv=kv: hit(model, prompt, prefix, n, chunk, kv), 3
            )
            found[method + where] = (replayed, seconds)
    return found


def fitting_layers(bench: Bench, spec: HybridSpec, tokens: int) -> int:
    """All layers, or as many as the free memory holds with room for activations."""
    if bench.device != "cuda":
        return len(spec.layers)
    free = torch.cuda.mem_get_info()[0] - 12 * 2**30
    need = 2 * spec.num_parameters() + tokens * spec.kv_bytes_per_token(2)
    return max(4, min(len(spec.layers), int(len(spec.layers) * free / need)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="toy sizes; the CPU's default")
    parser.add_argument("--quick", action="store_true", help="one minute")
    parser.add_argument("--seconds", type=float, default=440.0, help="when to stop")
    parser.add_argument("--json", type=Path, help=f"default: {RESULTS.name} in perf/results")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not triton.knobs.runtime.interpret:
        parser.error("there is no GPU: set TRITON_INTERPRET=1 to run toy sizes on the CPU")
    small = args.small or device == "cpu"
    path = args.json or (Path("artifacts/gpu-small.json") if small else RESULTS)
    bench = Bench(device, small, 55.0 if args.quick else args.seconds, path)
    torch.manual_seed(0)
    with torch.inference_mode():
        flops, bandwidth = measure_floors(bench)
        parts: dict[str, Callable[[], None]] = {
            "numerics": lambda: numerics(bench),
            "kernels": lambda: kernels(bench, flops, bandwidth),
            "sparse": lambda: sparse(bench, bandwidth),
            "ttft": lambda: ttft(bench),
        }
        failed = []
        for name, part in parts.items():
            try:
                part()
            except Exception as error:  # what the other parts find is still worth having
                bench.skip(f"{name}: {type(error).__name__}: {error}")
                failed.append(name)
    bench.save()
    show(bench)
    print(f"{bench.seconds - bench.left():.0f} s; {bench.path}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
