"""Convert a checkpoint into a bundle: ``python convert.py --model hybrid-tiny``.

The path of a conversion is build/pipeline.py.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from build.hub import find_checkpoint
from build.pipeline import Options
from build.plan import bytes_text, list_table
from build.quantize import quantise_speed
from build.targets import TARGETS
from build.trials import CalibrationOptions
from engine_configs.errors import HybridServeError
from engine_configs.families import read_checkpoint_config
from engine_configs.names import NamedModel, find_model, known_models
from serving.engine.bundle import Bundle
from serving.floor import disk_speed, peak_memory_gib

WIDEST = 132  # of any table printed here
ARTIFACTS = Path(__file__).parent / "artifacts"
_DTYPE_HELP = "; ".join(f"{name}: {', '.join(t.dtypes)}" for name, t in TARGETS.items())
console = Console(soft_wrap=True)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Bars:
    """One rich progress bar per stage."""

    @contextlib.contextmanager
    def stage(self, name: str, steps: int) -> Iterator[Callable[[], None]]:
        columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=console) as bars:
            task = bars.add_task(name, total=steps)
            yield lambda: bars.advance(task)


@app.command()
def main(
    model: Annotated[str, typer.Option(help="A name from --list; any with --checkpoint")] = "",
    checkpoint: Annotated[Path | None, typer.Option(help="Hugging Face model directory")] = None,
    random_weights: Annotated[int | None, typer.Option(help="Seed; no quality is claimed")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Default: artifacts/<model>[-<target>]")
    ] = None,
    target: Annotated[str, typer.Option(help=f"One of {', '.join(TARGETS)}")] = "onnx",
    lowering: Annotated[
        str, typer.Option(help="Of --target onnx: ort or standard (ai.onnx only)")
    ] = "",
    dtype: Annotated[
        str, typer.Option(help=f"{_DTYPE_HELP}; default: the model's own for the target")
    ] = "",
    max_kl: Annotated[float, typer.Option(help="Refuse a quantised model past this KL")] = 0.1,
    plan: Annotated[bool, typer.Option("--plan", help="Print what it costs and stop")] = False,
    memory_gib: Annotated[float, typer.Option(help="Memory that --plan fills")] = 24.0,
    calibrate: Annotated[bool, typer.Option(help="Measure how prefixes may be replayed")] = True,
    calibrate_seconds: Annotated[float, typer.Option(help="Time box of the calibration")] = 180.0,
    calibrate_on: Annotated[
        str, typer.Option(help="Run it on this served bundle (host:port of gRPC), a faster machine")
    ] = "",
    import_calibration: Annotated[
        Path | None, typer.Option(help="Calibration measured elsewhere: its JSON or a manifest")
    ] = None,
    list_models: Annotated[bool, typer.Option("--list", help="Models known by name")] = False,
) -> None:
    """Convert a hybrid model for serving."""
    try:
        if list_models:
            _print_table(list_table(known_models()))
            return
        _one_of("--target", target, tuple(TARGETS))
        row = TARGETS[target]
        _one_of("--lowering", lowering, ("", *row.lowerings))
        _one_of("--dtype", dtype, ("", *row.dtypes))
        lowering = lowering or row.lowerings[0]
        if not model and not checkpoint:
            _fail("give --model NAME (see --list) or --checkpoint DIR")
        name = model or checkpoint.name  # type: ignore[union-attr]
        known = NamedModel(name, "", {}, checkpoint) if checkpoint else find_model(name)
        family = known.family()
        dtype = dtype or row.default_dtype(known.dtype, lowering)
        source = None if random_weights is not None else known.checkpoint or find_checkpoint(known)
        unreachable = source is None and random_weights is None
        if plan or unreachable:
            _print_table(row.plan(name, family.spec, dtype, memory_gib))
        if plan:
            return
        if unreachable:
            _no_weights(known)
        if source:  # its own config.json counts; a name's numbers only serve to plan
            family = read_checkpoint_config(source)
        folder = output or ARTIFACTS / (name if target == "onnx" else f"{name}-{target}")
        options = Options(
            name,
            family,
            source,
            folder,
            random_weights or 0,
            lowering,
            dtype,
            max_kl,
            CalibrationOptions(seconds=calibrate_seconds)
            if calibrate and lowering != "standard"
            else None,
            import_calibration,
            calibrate_on,
            target,
        )
        started = time.monotonic()
        bundle = row.convert(options, Bars())
    except HybridServeError as e:
        _fail(str(e))
    except KeyboardInterrupt:
        _fail("interrupted; nothing was written", code=130)
    _print_result(bundle)
    _print_cost(bundle, time.monotonic() - started)


def _print_result(bundle: Bundle) -> None:
    for path, error in bundle.manifest["parity"].items():
        console.print(
            f"parity {path:<8} max |logit error| {error['max_abs_logit_error']:.2e}, "
            f"KL {error['logit_kl']:.1e}"
        )
    for what, why in bundle.manifest["skipped"].items():
        console.print(f"skipped {what}: {why}")
    console.print(f"replay: {bundle.calibration.verdict}")
    console.print(f"wrote {bundle.path}")


def _print_table(table: Table) -> None:
    """At its own width: a cell cut short would not be the figure asked for."""
    Console(width=max(console.width, WIDEST)).print(table)


def _print_cost(bundle: Bundle, seconds: float) -> None:
    """Time over its floor: bytes at this disk's speed, and quantising at this core's."""
    size = sum(bundle.manifest["files"].values())
    text = f"{bytes_text(size)} in {seconds:.0f} s, peak memory {peak_memory_gib():.2f} GiB"
    if size > 1 << 30:
        floor = size / disk_speed(bundle.path)
        if bundle.manifest["dtype"].startswith("int"):
            bits = int(bundle.manifest["dtype"].removeprefix("int"))
            floor += bundle.spec.num_parameters() / quantise_speed(bits)
        text += f"; floor {floor:.0f} s (disk and quantising), {seconds / floor:.1f}x"
    console.print(text)


def _no_weights(model: NamedModel) -> NoReturn:
    _fail(
        f"the weights of {model.name} ({model.hub_id}) are not on this machine and cannot be "
        "downloaded from here. Three ways forward:\n"
        f"  1. download: `hf download {model.hub_id}` where there is a network, then again\n"
        f"  2. convert.py --model {model.name} --checkpoint DIR   (a Hugging Face directory)\n"
        f"  3. convert.py --model {model.name} --random-weights 0 (sizes and speed, no quality)",
        code=2,
    )


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        known = [name for name in allowed if name]
        _fail(f"{option} is {value!r}, expected {' or '.join(known)}")


def _fail(message: str, code: int = 1) -> NoReturn:
    console.print(f"error: {message}", style="red", markup=False, highlight=False)
    raise typer.Exit(code)


if __name__ == "__main__":
    app()
