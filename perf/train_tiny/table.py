"""The measured figures as a table for the terminal and as the model's README."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from perf.train_tiny.evaluate import RATIOS, Cell, Report

_SUMMARY = {
    "hybrid-tiny": """\
A 1M-parameter hybrid (Gated DeltaNet and attention without positions) that retrieves through its
attention layers: replaying a short tail restores its answers. It is made to: at the start a clock
head is planted that ticks on every write (`perf/train_tiny/init.py`), and in a part of the training
steps the linear states are dropped late in the sequence (`recipe.py`).""",
    "hybrid-tiny-linear": """\
The control: shape and tokenizer of hybrid-tiny, but its facts live in the linear state, so tail
replay from a zero state must fail on it.""",
}


def columns() -> list[str]:
    return ["task", "length", "answers", "exact", *(f"r = {ratio:.0%}" for ratio in RATIOS)]


def rows(cells: list[Cell]) -> Iterator[list[str]]:
    for cell in cells:
        replayed = (f"{cell.accuracy[ratio]:.3f}" for ratio in RATIOS)
        yield [cell.task, str(cell.length), str(cell.answers), f"{cell.exact:.3f}", *replayed]


def terminal_table(report: Report) -> Table:
    table = Table(title="accuracy, exact and after tail replay from a zero linear state")
    for name in columns():
        table.add_column(name, justify="left" if name == "task" else "right")
    for row in rows(report.cells):
        table.add_row(*row)
    return table


def decay_line(report: Report) -> str:
    layers = (", ".join(f"{tokens:.3g}" for tokens in layer) for layer in report.decay_lengths)
    return "; ".join(layers)


def readme(model: str, report: Report) -> str:
    """The README.md of a trained model's directory."""
    lines = ["| " + " | ".join(columns()) + " |", "|---|" + "---:|" * (len(columns()) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows(report.cells)]
    table = "\n".join(lines)
    return f"""# {model}

{_SUMMARY.get(model, "A tiny hybrid.")}

{report.parameters:,} parameters, fp32, `olmo_hybrid` without RoPE, trained on one core by
`python -m perf.train_tiny --model {model}`.

Greedy accuracy on held-out samples of `build/tasks.py`, by
`python -m perf.train_tiny --evaluate engine_configs/{model}`: `exact` keeps every state; `r` is
the share of the prefix replayed with exact keys and values and linear states that start from zero
(r = 0 % drops the linear state). `text` is next-token accuracy, `split` a hit that ends inside a
question.

{table}

Decay length of each linear head on held-out text (1 / mean |log-decay|, tokens; layers separated
by semicolons): {decay_line(report)}.
"""
