"""``python -m serving.engine.generate BUNDLE PROMPT``: one answer, without a server."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from engine_configs.errors import HybridServeError
from serving.engine.bundle import Bundle
from serving.engine.engine import EngineConfig
from serving.engine.llm import LLM, Answer
from serving.engine.requests import SamplingParams
from serving.floor import memory_bandwidth, peak_memory_gib


def main(
    bundle: Annotated[Path, typer.Argument(help="A directory convert.py wrote")],
    prompt: Annotated[str, typer.Argument(help="Text, or @FILE")],
    max_tokens: Annotated[int, typer.Option()] = 64,
    temperature: Annotated[float, typer.Option()] = 0.0,
    top_k: Annotated[int, typer.Option()] = 0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    seed: Annotated[int | None, typer.Option()] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop word; may be repeated")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the chat template")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print text as it comes")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print token counts and times")] = False,
) -> None:
    """Generate an answer."""
    try:
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
        )
        text = Path(prompt[1:]).read_text() if prompt.startswith("@") else prompt
        with LLM.open(bundle, EngineConfig(max_batch=1)) as llm:
            if chat:
                text = llm.text.chat([{"role": "user", "content": text}])
            started = time.monotonic()
            answer = None
            for piece in llm.stream(llm.submit(text, sampling), stop or []):
                if isinstance(piece, Answer):
                    answer = piece
                elif stream:
                    print(piece, end="", flush=True)
            assert answer is not None
            print("" if stream else answer.text)
            if stats:
                _print_stats(answer, time.monotonic() - started, llm.bundle)
    except (HybridServeError, OSError, UnicodeDecodeError) as e:
        typer.echo(f"error: {e}", err=True)
        raise typer.Exit(1) from None


def _print_stats(answer: Answer, seconds: float, bundle: Bundle) -> None:
    usage = answer.usage
    first = usage.first_token_seconds
    rest = max(usage.generated_tokens - 1, 0)
    weights = bundle.manifest["files"].get("model.onnx.data", 0)
    bandwidth = memory_bandwidth(os.cpu_count() or 1)
    typer.echo(
        f"{usage.prompt_tokens} prompt tokens in {first:.3f} s "
        f"({usage.computed_tokens / max(first, 1e-9):.1f} tok/s), "
        f"{usage.generated_tokens} generated, "
        f"{rest / max(seconds - first, 1e-9):.1f} tok/s after the first; "
        f"finish: {answer.finish_reason}\n"
        f"floor: {weights / 1e9:.2f} GB of weights at {bandwidth / 1e9:.1f} GB/s read once a token "
        f"= {bandwidth / max(weights, 1):.1f} tok/s; peak memory {peak_memory_gib():.2f} GiB",
        err=True,
    )


if __name__ == "__main__":
    typer.run(main)
