"""``make demo``: three questions about one 2000-token text, served by Triton over three protocols.

The first is computed cold; the second hits the text's prefix and replays 5 % of it; the third
replays all of it, which is exact. Exits with 1 when an answer is wrong or a hit is missing.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from build.bundles import bundle_of
from build.tasks import make_samples, render
from serving.client import Client
from serving.launch import Server, launch

PREFIX_TOKENS = 2000
console = Console(width=110)
Answer = dict[str, Any]


def generate(server: Server, fields: Answer) -> Answer:
    """HTTP, the whole answer at once."""
    return dict(json.load(_post(server, "generate", fields)))


def generate_stream(server: Server, fields: Answer) -> Answer:
    """HTTP, server-sent events."""
    lines = (line.decode() for line in _post(server, "generate_stream", fields))
    parts = [json.loads(line.removeprefix("data: ")) for line in lines if line.strip()]
    return {**parts[-1], "text_output": "".join(p["text_output"] for p in parts)}


def grpc(server: Server, fields: Answer) -> Answer:
    """gRPC streaming."""
    with Client(server.grpc_url) as client:
        return client.generate(**fields)


def _post(server: Server, verb: str, fields: Answer) -> Any:
    fields = {**fields, "stream": verb == "generate_stream"}
    url = f"{server.http_url}/v2/models/llm/{verb}"
    return urllib.request.urlopen(url, json.dumps(fields).encode(), timeout=60)


STEPS: list[tuple[str, Callable[[Server, Answer], Answer], Answer]] = [
    ("generate, cold", generate, {}),
    ("generate_stream, replay 5 %", generate_stream, {"replay_ratio": 0.05}),
    ("gRPC, replay all", grpc, {"replay_ratio": 1.0}),
]


def main() -> None:
    """Run the demo."""
    bundle = bundle_of("hybrid-tiny")
    sample = make_samples("needle", PREFIX_TOKENS, len(STEPS), seed=3)[0]
    table = Table(title=f"{bundle.name} on Triton: questions about one {PREFIX_TOKENS}-token text")
    for name in ("request", "answer", "right", "prompt", "cached", "replayed", "computed", "ms"):
        table.add_column(name, justify="left" if name in ("request", "answer") else "right")
    good = True
    with console.status("starting Triton"), launch(bundle.path / "model_repository") as server:
        generate(server, {"text_input": "warm up", "max_tokens": 2})
        for (name, call, fields), question in zip(STEPS, sample.questions, strict=False):
            prompt = render(np.concatenate([sample.prefix, question.tokens]))
            started = time.monotonic()
            answer = call(
                server, {"text_input": prompt, "max_tokens": len(question.answer), **fields}
            )
            milliseconds = (time.monotonic() - started) * 1e3
            right = answer["text_output"] == render(question.answer)
            hit = answer["cached_tokens"] >= PREFIX_TOKENS or not fields
            good &= right and hit
            counts = [answer[f"{k}_tokens"] for k in ("prompt", "cached", "replayed", "computed")]
            row = [name, answer["text_output"], "yes" if right else "NO", *map(str, counts)]
            table.add_row(*row, f"{milliseconds:.0f}")
    console.print(table)
    console.print("stopped; nothing is left running")
    if not good:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
