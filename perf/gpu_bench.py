"""What perf.gpu's parts share: the clock, the rows found so far, the floors, the table."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


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
