"""README.md of a tree: how to serve it, what it does differently, what nobody has run yet."""

from __future__ import annotations

from pathlib import Path

from build.pipeline import Options

from .package.settings import ARCHITECTURE, Settings
from .package.symbols import ROOT, SYMBOLS

TEMPLATE = Path(__file__).parent / "tree_readme.md"


def readme(options: Options, settings: Settings) -> str:
    calibration = settings.calibration
    weights = "its checkpoint" if options.checkpoint else f"random weights (seed {options.seed})"
    start = (
        "an exact state at the end of an earlier prompt or turn; without a calibration nothing\n"
        "  approximate is used (give `--import-calibration`)"
    )
    if calibration.known:
        start = (
            f"a checkpoint of the slow units (every {calibration.interval} tokens) or from\n"
            "  zeros, whichever calibration allows and costs least"
        )
    rows = [
        f"| {line} | `{s.path.removeprefix(f'{ROOT}.')}` | {s.use} | {s.read} |"
        for line, symbols in SYMBOLS.items()
        for s in symbols
    ]
    return TEMPLATE.read_text().format(
        name=options.name,
        dtype=options.dtype,
        weights=weights,
        lines=" and ".join(f"{line}.x" for line in SYMBOLS),
        architecture=ARCHITECTURE,
        start=start,
        verdict=calibration.verdict,
        symbols="\n".join(rows),
    )
