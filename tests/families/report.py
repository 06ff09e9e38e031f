"""Prints the largest logit error of every family and path: ``python -m tests.families.report``."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.families.cases import CASES
from tests.families.subject import Subject, errors

PATHS = ("prefill", "chunks", "decode", "replay")


def table() -> Table:
    """One row per case; ``standard``: the worst path of the ai.onnx lowering."""
    rows = Table(title="Max |logit error| against transformers, fp32", title_justify="left")
    rows.add_column("case", no_wrap=True)
    for name in ("logit std", *PATHS, "standard", "limit"):
        rows.add_column(name, justify="right", no_wrap=True)
    for name, case in track(CASES.items(), description="families", transient=True):
        with tempfile.TemporaryDirectory() as folder:
            subject = Subject(case, Path(folder))
            found = errors(subject, subject.model)
            standard = max(errors(subject, subject.convert("standard")).values())
        figures = [*(found[path] for path in PATHS), standard, case.limit]
        cells = [f"{figure:.1e}" for figure in figures]
        style = "red" if max(*found.values(), standard) > case.limit else ""
        rows.add_row(name, f"{subject.want.std():.2f}", *cells, style=style)
    return rows


if __name__ == "__main__":
    Console(width=110).print(table())
