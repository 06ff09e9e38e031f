"""``python -m perf.load``: perf_analyzer against the real server, by share of common prefix.

Every prompt is sent exactly once. The first ``share`` of its tokens is common to all prompts of a
row, the rest is its own from the first token on, so the server must report exactly the common
tokens as cached: the benchmark fails where it does not.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from build.bundles import bundle_of
from build.tasks import BOS, FIRST_KEY, NUM_KEYS, NUM_VALUES, TaskGenerator, render
from engine_configs.errors import HybridServeError
from perf.perf_analyzer import Latencies, run, write_inputs
from perf.scrape import scrape
from serving.client import Client
from serving.engine.engine import EngineConfig
from serving.engine.llm import LLM
from serving.engine.requests import SamplingParams
from serving.launch import launch
from serving.prefix_cache import CacheConfig

MOST_PROMPTS = NUM_KEYS + NUM_VALUES  # each begins its own part with a symbol of its own
REPLAY = {"replay_mode": "ratio", "replay_ratio": 0.05}
console = Console(width=140)


@dataclass(frozen=True)
class Row:
    """One load at one share; times in seconds."""

    share: float
    load: str
    requests: int
    ttft_p50: float
    ttft_p99: float
    inter_token: float
    tokens_per_second: float
    cached: int
    replayed: int
    engine_ttft: float


def make_prompts(share: float, length: int, count: int, seed: int) -> tuple[str, list[str], int]:
    """(a prompt that caches the common part, the prompts, common tokens)."""
    common = int(share * length)
    texts = TaskGenerator(seed)
    head = np.concatenate([[BOS], texts.text(common - 1)]) if common else np.zeros(0, np.int64)
    prompts = [
        render([*head, FIRST_KEY + i, *texts.text(length - common - 1)]) for i in range(count)
    ]
    return render([*head, *texts.text(8)]) if common else "", prompts, common


def measure(
    server: Any, share: float, load: list[str], length: int, count: int, max_tokens: int
) -> Row:
    """One row: fresh prompts and a fresh salt, the common part cached beforehand."""
    salt = f"{share}-{' '.join(load)}-{time.time_ns()}"
    warm, prompts, common = make_prompts(share, length, count, seed=hash(salt) % 2**31)
    fields = {"max_tokens": max_tokens, "stream": True, "cache_salt": salt, **REPLAY}
    if warm:
        with Client(server.grpc_url) as client:
            client.generate(warm, max_tokens=1, cache_salt=salt)
    before = scrape(server.metrics_url)
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder) / "inputs.json"
        write_inputs(inputs, [{"text_input": p, **fields} for p in prompts])
        got = run(server.grpc_url, inputs, Path(folder) / "export.json", count, load)
    after = scrape(server.metrics_url)
    spent = {k: after[k] - before.get(k, 0) for k in after}
    cached = int(spent['hybrid_tokens_total{kind="cached"}'])
    served = int(spent['hybrid_requests_total{outcome="ok"}'])
    if cached != common * served or served < count:
        raise HybridServeError(
            f"{cached} tokens came from the cache for {served} requests, the workload shares "
            f"{common} tokens in each of {count}"
        )
    return _row(share, load, got, spent, served, cached)


def _row(
    share: float, load: list[str], got: Latencies, spent: dict[str, float], served: int, cached: int
) -> Row:
    return Row(
        share=share,
        load=" ".join(load).removeprefix("--").replace("-range", ""),
        requests=served,
        ttft_p50=got.percentile(50),
        ttft_p99=got.percentile(99),
        inter_token=statistics.mean(got.inter_token) if got.inter_token else 0.0,
        tokens_per_second=got.tokens / got.seconds,
        cached=cached,
        replayed=int(spent['hybrid_tokens_total{kind="replayed"}']),
        engine_ttft=spent["hybrid_ttft_seconds_sum"] / served,
    )


def in_process(model: str, length: int, max_tokens: int, repeats: int = 5) -> tuple[float, float]:
    """(TTFT, seconds per further token) of the engine alone, cold, one request at a time."""
    _, prompts, _ = make_prompts(0.0, length, repeats, seed=7)
    cache = CacheConfig(name="hybrid-serve-perf-load", kv_bytes=256 << 20)
    first, rest = [], []
    with LLM.open(bundle_of(model).path, EngineConfig(), cache) as llm:
        for prompt in prompts:
            started = time.monotonic()
            usage = llm.generate(prompt, SamplingParams(max_tokens=max_tokens)).usage
            total = time.monotonic() - started
            first.append(usage.first_token_seconds)
            rest.append((total - first[-1]) / max(usage.generated_tokens - 1, 1))
    return statistics.median(first), statistics.median(rest)


def table(rows: list[Row]) -> Table:
    out = Table(title="perf_analyzer, gRPC streaming, tail replay of 5 % (TTFT to first text)")
    names = ("share", "load", "requests", "TTFT p50 ms", "p99 ms", "between tokens ms", "tok/s")
    for name in (*names, "cached", "replayed", "chain's share of TTFT"):
        out.add_column(name, justify="right")
    for r in rows:
        out.add_row(
            f"{r.share:.0%}", r.load, str(r.requests), f"{r.ttft_p50 * 1e3:.1f}",
            f"{r.ttft_p99 * 1e3:.1f}", f"{r.inter_token * 1e3:.2f}", f"{r.tokens_per_second:.0f}",
            str(r.cached), str(r.replayed), f"{max(0.0, 1 - r.engine_ttft / r.ttft_p50):.0%}",
        )  # fmt: skip
    return out


def main(
    model: Annotated[str, typer.Option()] = "hybrid-tiny",
    share: Annotated[str, typer.Option()] = "0,0.5,0.95",
    concurrency: Annotated[str, typer.Option()] = "1,4",
    request_rate: Annotated[str, typer.Option(help="Requests per second, also")] = "",
    length: Annotated[int, typer.Option(help="Tokens of a prompt")] = 4096,
    max_tokens: Annotated[int, typer.Option()] = 16,
    requests: Annotated[int, typer.Option(help=f"Per row, at most {MOST_PROMPTS}")] = 24,
    quick: Annotated[bool, typer.Option("--quick")] = False,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Load-test a bundle served by Triton."""
    if quick:
        concurrency, requests, length = "1", 8, 2048
    loads = [["--concurrency-range", c] for c in concurrency.split(",") if c]
    loads += [["--request-rate-range", r] for r in request_rate.split(",") if r]
    rows = []
    with launch(bundle_of(model).path / "model_repository") as server:
        with Client(server.grpc_url) as client:
            client.generate("warm up", max_tokens=4)
        for load in loads:
            for part in share.split(","):
                with console.status(f"share {part}, {' '.join(load)}"):
                    count = min(requests, MOST_PROMPTS)
                    rows.append(measure(server, float(part), load, length, count, max_tokens))
    console.print(table(rows))
    first, rest = in_process(model, length, max_tokens)
    summary = summarise(rows, first, rest)
    for line in summary.values():
        console.print(line)
    if json_path:
        data = {"rows": [asdict(r) for r in rows], "in_process": {"ttft": first, "token": rest}}
        json_path.write_text(json.dumps({**data, "summary": summary}, indent=1))


def summarise(rows: list[Row], ttft: float, token: float) -> dict[str, str]:
    """Ratios of rows measured in this run."""
    lines = {}
    for load in dict.fromkeys(r.load for r in rows):
        same = {r.share: r for r in rows if r.load == load}
        low, high = same[min(same)], same[max(same)]
        lines[load] = (
            f"{load}: TTFT p50 at {high.share:.0%} share is {high.ttft_p50 / low.ttft_p50:.3f} of "
            f"that at {low.share:.0%}"
        )
    single = [r for r in rows if r.load == "concurrency 1"]
    if single:
        over = statistics.mean(r.inter_token for r in single) - token
        lines["overhead"] = (
            f"Triton and the calls between models add {over * 1e3:.2f} ms to the in-process "
            f"engine's {token * 1e3:.2f} ms per token; in-process cold TTFT {ttft * 1e3:.1f} ms"
        )
    return lines


if __name__ == "__main__":
    typer.run(main)
