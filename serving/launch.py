"""Serve a bundle with Triton: `python -m serving.launch BUNDLE/model_repository`.

Python callers use `with launch(repository) as server: ...`; both leave nothing running.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from engine_configs.errors import HybridServeError, LaunchError
from serving.launcher.server import LaunchOptions, Server, Stopped
from serving.tritonserver import find_tritonserver

__all__ = ["LaunchError", "LaunchOptions", "Server", "launch"]

DEFAULTS = LaunchOptions()


@contextlib.contextmanager
def launch(repository: Path | str, options: LaunchOptions = DEFAULTS) -> Iterator[Server]:
    """A ready, supervised server for the models in `repository`; stopped cleanly on the way out.

    Raises LaunchError when it does not get ready, or had to be given up meanwhile.
    """
    server = Server(find_tritonserver(), Path(repository), options)
    try:
        server.start()
        yield server
    finally:
        server.stop()
    if server.failure is not None:
        raise server.failure


def main(
    repository: Annotated[Path, typer.Argument(help="BUNDLE/model_repository")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = DEFAULTS.host,
    http_port: Annotated[int, typer.Option(help="0: a free one.")] = 0,
    grpc_port: Annotated[int, typer.Option(help="0: a free one.")] = 0,
    metrics_port: Annotated[int, typer.Option(help="0: a free one.")] = 0,
    ready_file: Annotated[
        Path | None, typer.Option(help="JSON with addresses and pid, there while it is ready.")
    ] = None,
    ready_timeout: Annotated[float, typer.Option(help="Seconds.")] = DEFAULTS.ready_timeout,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests get at SIGTERM.")
    ] = DEFAULTS.drain_timeout,
    restarts: Annotated[
        int, typer.Option(help="Restarts after a crash of the server or of a model's process.")
    ] = DEFAULTS.restarts,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show Triton's log.")] = False,
) -> None:
    """Run Triton on a model repository until SIGTERM or Ctrl-C; a second one kills at once."""
    options = LaunchOptions(
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        ready_timeout=ready_timeout,
        drain_timeout=drain_timeout,
        restarts=restarts,
        ready_file=ready_file,
        verbose=verbose,
    )
    try:
        _serve(repository, options)
    except HybridServeError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def _serve(repository: Path, options: LaunchOptions) -> None:
    if not options.host.startswith("127.") and options.host != "localhost":
        typer.echo(
            f"warning: listening on {options.host}: put something that validates requests in "
            "front, a single malformed one can end Triton's HTTP server",
            err=True,
        )
    server = Server(find_tritonserver(), repository, options, _announce)
    asked = 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        server.request_stop()
        if asked > 1:
            server.kill()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    try:
        server.start()
        server.wait()
    except Stopped:
        pass
    finally:
        server.stop()
    if server.failure is not None:
        raise server.failure
    typer.echo("stopped")


def _announce(server: Server) -> None:
    state = "restarted" if server.restarts else "ready"
    typer.echo(
        f"{state}: HTTP {server.http_url}  gRPC {server.grpc_url}  metrics {server.metrics_url}"
    )


if __name__ == "__main__":
    typer.run(main)
