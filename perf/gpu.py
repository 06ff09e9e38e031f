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
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine_configs.families import read_family
from engine_configs.families.config import ConfigReader
from engine_configs.names import find_model
from engine_configs.spec import HybridSpec
from perf.gpu_model import Model
from plugins.compressed_sparse_attention.kernel import attend
from plugins.linear_state_replay.kernel import SHAPES, linear_state_replay

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


@dataclass
class Bench:
    """Where and how large; rows found so far; when to stop."""

    device: str
    small: bool
    seconds: float
    path: Path
    started: float = field(default_factory=time.monotonic)
    machine: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.started)

    def add(self, part: str, row: dict[str, Any]) -> None:
        self.rows.setdefault(part, []).append(row)
        print("  ".join(f"{k} {_text(v)}" for k, v in row.items()), flush=True)
        self.save()

    def skip(self, what: str) -> None:
        self.skipped.append(what)
        print(f"skipped: {what}", flush=True)

    def save(self) -> None:
        data = {"small": self.small, "seconds": round(self.seconds - self.left(), 1)}
        data |= {"machine": self.machine, "skipped": self.skipped, **self.rows}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(data, indent=1))

    def sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def time(self, run: Callable[[], Any], repeats: int = 10) -> float:
        """Median seconds of one call; the first, which may compile, does not count."""
        if not self.small:
            run()
        times = []
        for _ in range(1 if self.small else repeats):
            self.sync()
            start = time.perf_counter()
            run()
            self.sync()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(dtype)


def measure_floors(bench: Bench) -> tuple[float, float]:
    """Operations a second of a bf16 matmul, bytes a second (read and written) of a copy."""
    n, size = (128, 1 << 16) if bench.small else (8192, 1 << 30)
    a, b = bench.random(n, n), bench.random(n, n)
    flops = 2 * n**3 / bench.time(lambda: a @ b)
    x = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    y = torch.empty_like(x)
    bandwidth = 2 * size / bench.time(lambda: y.copy_(x))
    name = torch.cuda.get_device_name() if bench.device == "cuda" else "CPU, interpreter"
    bench.machine = {
        "device": name, "torch": torch.__version__, "matmul_tflops": flops / 1e12,
        "copy_gb_s": bandwidth / 1e9,
    }  # fmt: skip
    if bench.device == "cuda":
        host = torch.empty(size // 4, dtype=torch.uint8, pin_memory=True)
        target = y[: size // 4]
        seconds = bench.time(lambda: target.copy_(host, non_blocking=True))
        bench.machine["host_to_device_gb_s"] = size / 4 / seconds / 1e9
    print("  ".join(f"{k} {_text(v)}" for k, v in bench.machine.items()), flush=True)
    return flops, bandwidth


def linear_inputs(
    bench: Bench, rule: str, decay: int, dk: int, dv: int, T: int, heads: int, dtype: torch.dtype
) -> dict[str, Any]:
    k = torch.nn.functional.normalize(torch.randn(1, T, heads, dk, device=bench.device), dim=-1)
    size = (1, T, heads, dk) if decay == 2 else (1, T, heads)
    log_decay = -torch.exp(torch.empty(size, device=bench.device).uniform_(-8, 0.5))
    beta = 2 * torch.rand(1, T, heads, device=bench.device) if "delta" in rule else None
    return {
        "q": bench.random(1, T, heads, dk, dtype=dtype), "k": k.to(dtype),
        "v": bench.random(1, T, heads, dv, dtype=dtype), "beta": beta, "log_decay": log_decay,
        "past_state": torch.randn(1, heads, dk, dv, device=bench.device),
    }  # fmt: skip


def exact_linear(x: dict[str, Any], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """ref.py in torch, float64."""
    y = {n: None if t is None else t.double() for n, t in x.items()}
    S, out = y["past_state"], []
    for t in range(y["q"].shape[1]):
        q, k, v = (y[n][:, t] for n in "qkv")
        decay = y["log_decay"][:, t].exp()
        S = S * (decay[..., None] if decay.ndim == 3 else decay[..., None, None])
        if y["beta"] is not None:
            v = y["beta"][:, t, :, None] * (v - torch.einsum("bhkv,bhk->bhv", S, k))
        S = S + k[..., None] * v[..., None, :]
        out.append(scale * torch.einsum("bhkv,bhk->bhv", S, q))
    return torch.stack(out, 1), S


def numerics(bench: Bench) -> None:
    """Largest error over the largest value."""
    T, heads = (70, 2) if bench.small else (1000, 16)
    dtypes = (torch.bfloat16,) if bench.small else (torch.bfloat16, torch.float16)
    shapes = (("gated_delta", 1, 24, 48), ("gated", 1, 16, 16)) if bench.small else SHAPES
    for dtype in dtypes:
        for rule, decay, dk, dv in shapes:
            if bench.left() < 0.6 * bench.seconds:
                bench.skip(f"numerics of {rule} {dk}x{dv} {dtype}")
                continue
            x = linear_inputs(bench, rule, decay, dk, dv, T, heads, dtype)
            scale = dk**-0.5
            o, state = linear_state_replay(**x, update_rule=rule, scale=scale)
            want_o, want_state = exact_linear(x, scale)
            bench.add("numerics", {
                "kernel": f"{rule} {('', 'head', 'key')[decay]} {dk}x{dv}", "tokens": T,
                "dtype": str(dtype).removeprefix("torch."),
                "error_o": _error(o, want_o), "error_state": _error(state, want_state),
            })  # fmt: skip
        for D, T_q, total in ((16, 5, 100),) if bench.small else ((128, 300, 4000), (256, 1, 4000)):
            q, k, v, table, lens = attention_inputs(bench, 4, 2, D, T_q, total, dtype)
            o, _ = attend(q, k, v, table, lens, scale=D**-0.5)
            want = exact_attention(q, k, v, table, total)
            bench.add("numerics", {
                "kernel": f"attention {D}", "tokens": T_q,
                "dtype": str(dtype).removeprefix("torch."), "error_o": _error(o, want),
            })  # fmt: skip


def attention_inputs(
    bench: Bench, Hq: int, Hk: int, D: int, T: int, total: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, ...]:
    pages = -(-total // 32)
    k, v = (bench.random(pages, 32, Hk, D, dtype=dtype) for _ in range(2))
    table = torch.randperm(pages, device=bench.device, dtype=torch.int32)[None]
    lens = torch.tensor([total], device=bench.device, dtype=torch.int32)
    return bench.random(1, T, Hq, D, dtype=dtype), k, v, table, lens


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, total: int
) -> torch.Tensor:
    T, Hq, D = q.shape[1:]
    rows = [t[table[0].long()].flatten(0, 1)[:total].double() for t in (k, v)]
    keys, values = (t.repeat_interleave(Hq // t.shape[1], 1) for t in rows)
    score = torch.einsum("thd,nhd->htn", q[0].double(), keys) * D**-0.5
    at = torch.arange(total - T, total, device=q.device)[:, None]
    score = score.masked_fill(torch.arange(total, device=q.device) > at, -math.inf)
    return torch.einsum("htn,nhd->thd", score.softmax(-1), values)[None]


def kernels(bench: Bench, flops: float, bandwidth: float) -> None:
    """Times over floors, whichever of operations and bytes takes longer."""
    half = torch.bfloat16
    for rule, decay, dk, dv, heads in (
        ("gated_delta", 1, 128, 128, 32), ("gated_delta", 1, 96, 192, 30),
        ("gated_delta", 2, 128, 128, 32), ("gated", 1, 128, 64, 128),
    ):  # fmt: skip
        if bench.small:
            dk, dv, heads = 16, 16, 1
        for T in (1, 70) if bench.small else (1, 512, 4096):
            if bench.left() < 0.5 * bench.seconds:
                bench.skip(f"time of {rule} {dk}x{dv} T={T}")
                continue
            x = linear_inputs(bench, rule, decay, dk, dv, T, heads, half)
            state = x.pop("past_state")

            def run(x: Any = x, state: Any = state, rule: str = rule, dk: int = dk) -> Any:
                return linear_state_replay(
                    **x, past_state=state, present_state=state, update_rule=rule, scale=dk**-0.5
                )

            moved = sum(t.numel() * t.element_size() for t in x.values() if t is not None)
            moved += 2 * x["v"].numel() + 2 * 4 * state.numel()
            # Per token and chunk of 64: q k^T, k k^T, k S, q S, k^T u and two products with u.
            work = 2 * T * heads * (2 * 64 * dk + 3 * dk * dv + 2 * 64 * dv) if T > 1 else 0
            add_time(bench, f"{rule} {('', 'head', 'key')[decay]} {dk}x{dv} heads={heads}", T,
                     bench.time(run), work / flops, moved / bandwidth)  # fmt: skip
    for name, Hq, Hk, D in (("qwen3.5-9b", 16, 4, 256), ("hybrid-7b", 30, 30, 128)):
        if bench.small:
            Hq, Hk, D = 2, 1, 16
        for T, total in ((1, 100), (5, 100)) if bench.small else ((1, 32768), (1638, 32768)):
            if bench.left() < 0.45 * bench.seconds:
                bench.skip(f"time of attention {name} T={T}")
                continue
            inputs = attention_inputs(bench, Hq, Hk, D, T, total)
            moved = 2 * 2 * total * Hk * D + 2 * 2 * T * Hq * D
            work = 4 * T * (total - T / 2) * Hq * D

            def read(inputs: Any = inputs, D: int = D) -> Any:
                return attend(*inputs, scale=D**-0.5)

            add_time(bench, f"attention {name} of {total}", T, bench.time(read), work / flops,
                     moved / bandwidth)  # fmt: skip


def add_time(
    bench: Bench, name: str, tokens: int, seconds: float, work: float, moved: float
) -> None:
    floor = max(work, moved)
    bench.add("kernels", {
        "kernel": name, "tokens": tokens, "ms": seconds * 1e3, "floor_ms": floor * 1e3,
        "over_floor": seconds / floor, "floor": "matmul" if work > moved else "copy",
    })  # fmt: skip


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


def prefill(model: Model, tokens: torch.Tensor, start: int, chunk: int) -> None:
    """Append tokens [T] from position ``start`` on; the last prompt token runs by itself."""
    for first in range(0, len(tokens) - 1, chunk):
        part = tokens[first : min(first + chunk, len(tokens) - 1)]
        model.run(part, start + first + len(part), append=True)
    model.run(tokens[-1:], start + len(tokens), append=True).argmax().item()


def hit(model: Model, tokens: torch.Tensor, prefix: int, replayed: int, chunk: int,
        host: HostKv | None) -> None:  # fmt: skip
    """Replay the last tokens of the prefix from zero (or slow) states, then run the suffix."""
    model.reset()
    if host:
        host.start()
    wait = host.wait if host else lambda _: None
    for first in range(prefix - replayed, prefix, chunk):
        part = tokens[first : min(first + chunk, prefix)]
        model.run(part, first + len(part), append=False, ready=wait)
    prefill(model, tokens[prefix:], prefix, chunk)


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


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).abs().max() / want.abs().max())


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def show(bench: Bench) -> None:
    """One table: rich's where it is installed, else plain."""
    columns = ("part", "what", "tokens", "result", "against")
    rows = []
    for r in bench.rows.get("numerics", []):
        state = f", state {r['error_state']:.1e}" if "error_state" in r else ""
        rows.append(("numerics", f"{r['kernel']} {r['dtype']}", str(r["tokens"]),
                     f"error {r['error_o']:.1e}{state}", "float64"))  # fmt: skip
    for r in bench.rows.get("kernels", []):
        rows.append(("kernel", r["kernel"], str(r["tokens"]), f"{r['ms']:.3g} ms",
                     f"{r['over_floor']:.3g}x its {r['floor']} floor"))  # fmt: skip
    for r in bench.rows.get("ttft", []):
        rows.append(("ttft", f"{r['model']} ({r['layers']} layers) {r['prefix']} {r['method']}",
                     str(r["tokens_run"]), f"{r['ms']:.4g} ms",
                     f"cold / this {r['cold_over']:.3g}"))  # fmt: skip
    title = f"{bench.machine.get('device')}: kernels and time to first token"
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(title, *("  ".join(row) for row in (columns, *rows)), sep="\n")
        return
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    Console(width=130).print(table)


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
    small = args.small or device == "cpu"
    path = args.json or (Path("artifacts/gpu-small.json") if small else RESULTS)
    bench = Bench(device, small, 55.0 if args.quick else args.seconds, path)
    torch.manual_seed(0)
    with torch.inference_mode():
        flops, bandwidth = measure_floors(bench)
        for part in (numerics, lambda b: kernels(b, flops, bandwidth), ttft):
            try:
                part(bench)
            except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
                bench.skip(f"{getattr(part, '__name__', 'kernels')}: {error}")
    bench.save()
    show(bench)
    print(f"{bench.seconds - bench.left():.0f} s; {bench.path}")


if __name__ == "__main__":
    main()
