"""Trains a tiny hybrid, saves it in Hugging Face layout and measures what was saved."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from perf.train_tiny import checkpoint, table
from perf.train_tiny import train as training
from perf.train_tiny.evaluate import Plan, Report, evaluate
from perf.train_tiny.recipe import RECIPES

QUICK_STEPS = 40
QUICK_PLAN = Plan(tasks=("needle", "lww"), lengths=(256, 512), answers=64)
console = Console()


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )


def _train(model: str, output: Path, quick: bool) -> None:
    recipe = RECIPES[model]
    if quick:
        recipe = replace(recipe, rounds=(replace(recipe.rounds[0], steps=QUICK_STEPS),))
    started = time.process_time()
    with _progress() as progress:
        bar = progress.add_task(f"train {model}", total=recipe.steps, note="")

        def report(step: training.Progress) -> None:
            accuracy = " ".join(f"{task} {share:.2f}" for task, share in step.accuracy.items())
            progress.update(bar, advance=1, note=accuracy)

        trained = training.train(recipe, report)
    error = checkpoint.save(trained, output)
    console.print(
        f"saved {output} ({time.process_time() - started:.0f} s of one core); "
        f"largest logit error against transformers {error:.1e}"
    )


def _evaluate(directory: Path, plan: Plan) -> Report:
    cells = list(plan.cells())
    with _progress() as progress:
        bar = progress.add_task(f"measure {directory.name}", total=len(cells), note="")
        return evaluate(directory, plan, lambda cell: progress.advance(bar))


def main(
    model: Annotated[str, typer.Option(help="which recipe")] = "hybrid-tiny",
    output: Annotated[Path | None, typer.Option(help="directory to write")] = None,
    quick: Annotated[bool, typer.Option(help="under a minute; shows that it runs")] = False,
    evaluate_only: Annotated[
        Path | None, typer.Option("--evaluate", help="measure this directory, train nothing")
    ] = None,
    write_readme: Annotated[bool, typer.Option(help="write the table to its README.md")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="write the figures")] = None,
) -> None:
    """Trains on one core with a fixed seed, then measures the saved files."""
    torch.set_num_threads(1)
    if model not in RECIPES:
        known = ", ".join(RECIPES)
        raise typer.BadParameter(f"{model!r} is not one of {known}", param_hint="--model")
    directory = (
        evaluate_only
        or output
        or Path("artifacts/train_tiny") / (f"{model}-quick" if quick else model)
    )
    if evaluate_only is None:
        _train(model, directory, quick)
    report = _evaluate(directory, QUICK_PLAN if quick else Plan())
    console.print(table.terminal_table(report))
    console.print(f"decay lengths in tokens, per layer: {table.decay_line(report)}")
    if write_readme or evaluate_only is None:
        (directory / "README.md").write_text(table.readme(directory.name, report))
    if json_path is not None:
        json_path.write_text(json.dumps(report.as_dict(), indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
