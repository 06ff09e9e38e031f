"""``python -m perf.ttft``: time to first token of a cold prompt, an exact hit, a ratio hit.

In process, one request at a time. Each prompt is a prefix and a fresh 64-token suffix:

    cold        nothing cached
    exact hit   the prefix was a prompt of its own, so a full state lies at its end
    ratio hit   another continuation of the prefix was served: no state near, a 5 % tail is replayed
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from build.bundles import bundle_of
from serving.engine.engine import EngineConfig
from serving.engine.llm import LLM
from serving.engine.requests import EXACT_REPLAY, Request, SamplingParams, Usage
from serving.prefix_cache import CacheConfig, ReplayMode, ReplayRequest

SUFFIX = 64
console = Console(width=110)
Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class Row:
    """Medians over repeats, seconds; ``tokens`` ran through the model."""

    method: str
    prefix: int
    ttft: float
    load: float
    tokens: int
    over_cold: float


def serve(llm: LLM, tokens: Tokens, salt: str, replay: ReplayRequest = EXACT_REPLAY) -> Usage:
    sampling = SamplingParams(max_tokens=1)
    stream = llm.engine.submit(Request(tokens, sampling, replay, cache_salt=salt))
    stream.tokens()
    return stream.usage


def measure(llm: LLM, prefix: int, repeats: int, ratio: float) -> list[Row]:
    """The three methods at one prefix length."""
    rng = np.random.default_rng(prefix)
    vocab = llm.bundle.spec.vocab_size

    def draw(count: int) -> Tokens:
        return rng.integers(0, vocab, count, dtype=np.int32)

    base = draw(prefix)
    tail = ReplayRequest(ReplayMode.RATIO, ratio)
    serve(llm, base, "exact")  # leaves a state at its end
    serve(llm, np.concatenate([base, draw(prefix // 2)]), "ratio")  # its state lies far beyond
    methods: dict[str, Callable[[Tokens, int], Usage]] = {
        "cold": lambda prompt, i: serve(llm, prompt, f"cold{i}"),
        "exact hit": lambda prompt, i: serve(llm, prompt, "exact"),
        f"{ratio:.0%} hit": lambda prompt, i: serve(llm, prompt, "ratio", tail),
    }
    usages: dict[str, list[Usage]] = {name: [] for name in methods}
    for i in range(repeats):  # interleaved, so that a busy moment hits all of them
        for name, run in methods.items():
            usages[name].append(run(np.concatenate([base, draw(SUFFIX)]), i))
    for usage in usages[f"{ratio:.0%} hit"]:
        assert usage.cached_tokens == prefix, "the workload must hit its whole prefix"
    cold = statistics.median(u.first_token_seconds for u in usages["cold"])
    rows = []
    for name, got in usages.items():
        ttft = statistics.median(u.first_token_seconds for u in got)
        load = statistics.median(u.load_seconds for u in got)
        rows.append(Row(name, prefix, ttft, load, got[0].computed_tokens, ttft / cold))
    return rows


def table(model: str, rows: list[Row]) -> Table:
    out = Table(title=f"{model}: time to first token, {SUFFIX}-token suffix (medians)")
    for column in ("prefix", "method", "TTFT ms", "cold / TTFT", "tokens run", "load ms"):
        out.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        out.add_row(
            str(row.prefix),
            row.method,
            f"{row.ttft * 1e3:.1f}",
            f"{1 / row.over_cold:.1f}x",
            str(row.tokens),
            f"{row.load * 1e3:.2f}",
        )
    return out


def main(
    model: Annotated[str, typer.Option()] = "hybrid-tiny",
    prefixes: Annotated[str, typer.Option()] = "1024,2048,4096,8000",
    repeats: Annotated[int, typer.Option()] = 7,
    ratio: Annotated[float, typer.Option()] = 0.05,
    quick: Annotated[bool, typer.Option("--quick", help="4K only")] = False,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure TTFT by prefix length and kind of hit."""
    lengths = [4096] if quick else [int(p) for p in prefixes.split(",")]
    longest = max(lengths) * 3 // 2 + SUFFIX
    engine = EngineConfig(max_seq_len=longest, max_batch=1)
    cache = CacheConfig(name="hybrid-serve-perf-ttft", kv_bytes=1 << 30)
    rows = []
    with LLM.open(bundle_of(model).path, engine, cache) as llm:
        for prefix in track(lengths, description="prefix lengths", console=console):
            rows += measure(llm, prefix, repeats, ratio)
    console.print(table(model, rows))
    if json_path:
        json_path.write_text(json.dumps([asdict(r) for r in rows], indent=1))


if __name__ == "__main__":
    typer.run(main)
