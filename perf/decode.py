"""``python -m perf.decode``: one decode step of attention against what memory allows.

One sequence, one layer, T = 1; every method reads the same slots in the same run, in turns:

    floor             reading K and V once, nothing else
    dense             our kernel
    sparse            our kernel with an error bound: what is read, chosen, estimated and updated
    select only       the same with a bound so wide that only the last blocks are read
    ORT               com.microsoft::GroupQueryAttention
    torch             scaled_dot_product_attention

Keys are 32-row blocks around centres of their own; the queries are as sharp as makes the sparse
step read about a tenth of the rows. The error is that of the output against float64.

One thread is timed by the processor time it got, so that a busy machine does not count; several by
the clock.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from perf.attention_op import AttentionOp, BoundStep, Sizes
from serving.engine.native import summarise_slot

BLOCK = 32
SHARE = 0.10  # of the rows, that the sparse step should read
SPREAD = 0.3  # of keys about their block's centre
SHARPNESS = np.geomspace(0.5, 16, 41)
WIDE = 1e6  # an error bound that nothing breaks
console = Console(width=110)
Array = NDArray[Any]


@dataclass(frozen=True)
class Row:
    """``seconds``: the best of all turns; ``median``; ``bytes_read``: of K, V and summaries."""

    method: str
    seconds: float
    median: float
    bytes_read: int
    over_floor: float
    over_dense: float
    rows_read: float
    error: float


@dataclass
class Problem:
    """Slots k, v [Hk, n, d] whose last row is written by the step; q [Hq, d]; the entries."""

    sizes: Sizes
    k: Array
    v: Array
    q: Array
    row: tuple[Array, Array]
    summaries: Array
    stats: Array
    epsilon: float

    @classmethod
    def make(cls, sizes: Sizes, context: int, epsilon: float) -> Problem:
        """``context`` rows, rounded so that the step's row opens a block: that is when it has a
        block to summarise."""
        rng = np.random.default_rng(0)
        n = context // BLOCK * BLOCK + 1
        shape, blocks = (sizes.Hk, n, sizes.d), -(-n // BLOCK)
        centres = rng.standard_normal((sizes.Hk, blocks, 1, sizes.d), np.float32)
        noise = rng.standard_normal((sizes.Hk, blocks, BLOCK, sizes.d), np.float32)
        k = (centres + SPREAD * noise).reshape(sizes.Hk, -1, sizes.d)[:, :n].copy()
        v = rng.standard_normal(shape, np.float32)
        v += np.repeat(centres, BLOCK, axis=2).reshape(sizes.Hk, -1, sizes.d)[:, :n]
        entries = [summarise_slot(k[h], v[h]) for h in range(sizes.Hk)]
        return cls(
            sizes,
            k,
            v,
            rng.standard_normal((sizes.Hq, sizes.d), np.float32),
            (k[:, -1].copy(), v[:, -1].copy()),
            np.stack([e for e, _ in entries]),
            np.stack([s for _, s in entries]),
            epsilon,
        )

    def dense(self, op: AttentionOp) -> BoundStep:
        return op.dense(self.q, self.k, self.v, self.row)

    def sparse(self, op: AttentionOp, epsilon: float) -> BoundStep:
        rows = np.full(self.sizes.Hk, self.k.shape[1])
        return op.sparse(
            self.q, self.k, self.v, self.row, rows=rows, summaries=self.summaries,
            stats=self.stats, epsilon=epsilon, factor=1.0,
        )  # fmt: skip

    def sharpen(self, op: AttentionOp) -> None:
        """Scale the queries so that the sparse step reads about ``SHARE`` of the rows."""
        base = self.q

        def miss(sharpness: float) -> float:
            self.q = (base * sharpness).astype(np.float32)
            step = self.sparse(op, self.epsilon)
            step.run()
            return abs(step.answers["rows_read"].mean() / self.k.shape[1] - SHARE)

        miss(min(SHARPNESS, key=miss))

    def answer(self) -> Array:
        """o [Hq, d] in float64."""
        q = self.q.astype(np.float64) * self.sizes.scale
        out = []
        for h in range(self.sizes.Hk):
            group = q.reshape(self.sizes.Hk, -1, self.sizes.d)[h]
            score = group @ self.k[h].astype(np.float64).T
            p = np.exp(score - score.max(1, keepdims=True))
            out.append(p @ self.v[h].astype(np.float64) / p.sum(1, keepdims=True))
        return np.concatenate(out)

    def error(self, o: Array, want: Array) -> float:
        """Mean over heads of the relative error."""
        away = np.linalg.norm(o.reshape(want.shape) - want, axis=1)
        return float((away / np.linalg.norm(want, axis=1)).mean())


def reader(arrays: list[Array], threads: int) -> Callable[[], None]:
    """Reads everything once, as fast as may be."""
    flat = np.concatenate([a.reshape(-1) for a in arrays])
    parts = np.array_split(flat, threads)
    if threads == 1:
        return lambda: np.max(flat)
    pool = ThreadPoolExecutor(threads)
    return lambda: list(pool.map(np.max, parts)) and None


def torch_step(p: Problem, threads: int) -> tuple[Callable[[], None], dict[str, Array]]:
    torch.set_num_threads(threads)
    q = torch.from_numpy(p.q)[None, :, None]
    k, v = torch.from_numpy(p.k)[None], torch.from_numpy(p.v)[None]
    answers: dict[str, Array] = {}

    def run() -> None:
        with torch.inference_mode():
            o = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, scale=p.sizes.scale, enable_gqa=p.sizes.Hq != p.sizes.Hk
            )
        answers["o"] = o.numpy()

    return run, answers


def measure(sizes: Sizes, context: int, epsilon: float, threads: int, turns: int) -> list[Row]:
    native = AttentionOp(sizes, threads, native=True)
    problem = Problem.make(sizes, context, epsilon)
    problem.sharpen(native)
    steps = {
        "dense": problem.dense(native),
        "sparse": problem.sparse(native, epsilon),
        "select only": problem.sparse(native, WIDE),
        "ORT": problem.dense(AttentionOp(sizes, threads, native=False)),
    }
    runs = {"floor": reader([problem.k, problem.v], threads)}
    runs |= {name: step.run for name, step in steps.items()}
    runs["torch"], by_torch = torch_step(problem, threads)
    answers = {name: step.answers for name, step in steps.items()} | {"torch": by_torch}

    now = time.thread_time if threads == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in runs}
    label = f"{sizes.Hq}/{sizes.Hk} heads x {sizes.d}, {context} rows"
    for turn in track(range(turns + 1), label, console=console, transient=True):
        for name, run in runs.items():
            started = now()
            run()
            if turn:  # the first warms up
                times[name].append(now() - started)
    want, n = problem.answer(), problem.k.shape[1]
    floor, dense = min(times["floor"]), min(times["dense"])
    whole, entries = problem.k.nbytes + problem.v.nbytes, problem.summaries.nbytes
    rows = []
    for name, taken in times.items():
        found = answers.get(name, {})
        sparse = "sparse" in name or "select" in name
        share = float(found["rows_read"].mean() / n) if sparse else 1.0
        best = min(taken)
        rows.append(
            Row(
                name,
                best,
                statistics.median(taken),
                int(whole * share) + (entries if sparse else 0),
                best / floor,
                best / dense,
                share,
                problem.error(found["o"], want) if found else 0.0,
            )
        )
    return rows


def table(sizes: Sizes, context: int, threads: int, rows: list[Row]) -> Table:
    title = f"Attention, {sizes.Hq} query and {sizes.Hk} K/V heads of {sizes.d}, {context} rows, "
    out = Table(title=title + f"{threads} thread{'s' * (threads > 1)}")
    for column in ("method", "ms", "median", "GB/s", "over floor", "over dense", "rows", "error"):
        out.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        out.add_row(
            row.method,
            f"{row.seconds * 1e3:.2f}",
            f"{row.median * 1e3:.2f}",
            f"{row.bytes_read / row.seconds / 1e9:.1f}",
            f"{row.over_floor:.2f}x",
            f"{row.over_dense:.3f}x",
            f"{row.rows_read:.1%}",
            "" if row.method == "floor" else f"{row.error:.1e}",
        )
    return out


def main(
    context: Annotated[int, typer.Option(help="Rows of the slot")] = 32768,
    heads: Annotated[str, typer.Option(help="Query/KV heads, several by commas")] = "32/8,8/8",
    head_dim: Annotated[int, typer.Option()] = 128,
    epsilon: Annotated[float, typer.Option(help="Relative error allowed to sparse")] = 0.014,
    threads: Annotated[int, typer.Option(help="Of every method; 0 = all cores")] = 1,
    turns: Annotated[int, typer.Option(help="Of each method")] = 30,
    quick: Annotated[bool, typer.Option("--quick", help="Shorter context, fewer turns")] = False,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Time decode attention: ours dense and sparse, ONNX Runtime's, torch's."""
    threads = threads or os.cpu_count() or 1
    if quick:
        context, turns = min(context, 8192), min(turns, 8)
    found = []
    for part in heads.split(","):
        Hq, Hk = (int(n) for n in part.split("/"))
        sizes = Sizes(Hq, Hk, head_dim)
        rows = measure(sizes, context, epsilon, threads, turns)
        console.print(table(sizes, context, threads, rows))
        saved = 1 - next(r.over_dense for r in rows if r.method == "sparse")
        console.print(f"  the sparse step takes {saved:.1%} less time than the dense one\n")
        found.append({"sizes": asdict(sizes), "rows": [asdict(r) for r in rows]})
    if json_path:
        what = {"context": context, "threads": threads, "epsilon": epsilon, "layers": found}
        json_path.write_text(json.dumps(what, indent=1))


if __name__ == "__main__":
    typer.run(main)
