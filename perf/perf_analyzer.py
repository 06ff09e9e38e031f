"""Runs NVIDIA's perf_analyzer against a served bundle and reads its export."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine_configs.errors import HybridServeError

HOME = Path(sys.prefix) / "perf_analyzer"


@dataclass(frozen=True)
class Latencies:
    """Seconds of every request: to its first text, and between its texts."""

    ttft: list[float]
    inter_token: list[float]
    tokens: int
    seconds: float

    def percentile(self, q: float) -> float:
        return float(np.percentile(self.ttft, q))


def write_inputs(path: Path, requests: list[dict[str, Any]]) -> None:
    """The input file: one entry a request, every value a list."""
    data = [{k: v if isinstance(v, list) else [v] for k, v in r.items()} for r in requests]
    path.write_text(json.dumps({"data": data}))


def run(
    grpc_url: str, inputs: Path, export: Path, count: int, load: list[str], timeout: float = 600
) -> Latencies:
    """Send ``count`` requests once each; ``load``: ``--concurrency-range 4`` and the like.

    Raises HybridServeError with perf_analyzer's own words when it fails.
    """
    command = [
        str(HOME / "bin" / "perf_analyzer"), "-m", "llm", "-u", grpc_url, "-i", "grpc",
        "--streaming", "--input-data", str(inputs), "--request-count", str(count),
        "--profile-export-file", str(export), *load,
    ]  # fmt: skip
    environment = {**os.environ, "LD_LIBRARY_PATH": str(HOME / "lib")}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    if done.returncode != 0 or not export.exists():
        raise HybridServeError(
            f"perf_analyzer failed ({done.returncode}): {(done.stderr or done.stdout)[-800:]}"
        )
    return read_export(export)


def read_export(path: Path) -> Latencies:
    """TTFT = first response − request; times between later responses that carry text."""
    requests = json.loads(path.read_text())["experiments"][0]["requests"]
    ttft, gaps, tokens = [], [], 0
    start = min(r["timestamp"] for r in requests)
    end = max(r["response_timestamps"][-1] for r in requests)
    for request in requests:
        stamps = [
            stamp
            for stamp, output in zip(
                request["response_timestamps"], request["response_outputs"], strict=True
            )
            if output.get("text_output")
        ]
        if stamps:
            ttft.append((stamps[0] - request["timestamp"]) / 1e9)
            gaps += (np.diff(stamps) / 1e9).tolist()
            tokens += len(stamps)
    return Latencies(ttft, gaps, tokens, (end - start) / 1e9)
