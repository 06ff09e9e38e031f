"""`python -m serving.launch` as a person or a service manager runs it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from serving.launcher import residue

from .conftest import (
    ECHO_CONFIG,
    Launched,
    Stream,
    ask_echo,
    assert_nothing_left,
    post,
    wait_until,
    write_model,
)

Run = Callable[..., Launched]


def address(ready: dict[str, str]) -> str:
    return ready["http_url"].removeprefix("http://")


def test_sigterm_drains_and_leaves_nothing(run_launch: Run) -> None:
    run = run_launch()
    ready = run.ready()
    stream = Stream(address(ready), wanted=15)
    stream.wait_for_events(2)
    run.signal()
    time.sleep(0.5)
    with pytest.raises(ConnectionError):
        post(address(ready), "/v2/models/echo/generate", {"unused": 1})
    output = run.output()
    assert run.process.returncode == 0
    assert (stream.events, stream.complete) == (15, True), "the running request was cut off"
    assert f"ready: HTTP {ready['http_url']}" in output
    assert output.endswith("stopped\n")
    assert not run.ready_file.exists()
    assert_nothing_left(ready["run_id"], int(ready["pid"]))


def test_second_signal_kills_at_once(run_launch: Run) -> None:
    run = run_launch()
    ready = run.ready()
    stream = Stream(address(ready), wanted=600)
    stream.wait_for_events(1)
    run.signal(signal.SIGINT)
    time.sleep(0.5)
    assert run.process.poll() is None, "it did not wait for the running request"
    start = time.monotonic()
    run.signal()
    run.output()
    assert time.monotonic() - start < 5
    assert run.process.returncode == 0
    assert_nothing_left(ready["run_id"], int(ready["pid"]))


def test_drain_ends_at_its_timeout(run_launch: Run) -> None:
    run = run_launch("--drain-timeout", "1")
    ready = run.ready()
    stream = Stream(address(ready), wanted=600)
    stream.wait_for_events(1)
    run.signal()
    run.output(timeout=15)
    assert_nothing_left(ready["run_id"], int(ready["pid"]))


def test_killed_launcher_takes_the_server_with_it(run_launch: Run) -> None:
    run = run_launch()
    ready = run.ready()
    run.signal(signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{ready['pid']}").exists(), 15, "the server to end")
    wait_until(lambda: not residue.find_stubs(ready["run_id"]), 5, "its stubs to end")
    residue.remove(ready["run_id"])  # the test model leaves its arena to the launcher


def test_restarts_on_the_same_ports_then_gives_up(run_launch: Run) -> None:
    run = run_launch("--restarts", "1")
    first = run.ready()
    os.kill(int(first["pid"]), signal.SIGKILL)

    def again() -> bool:
        return run.ready_file.exists() and run.ready()["run_id"] != first["run_id"]

    wait_until(again, 10, "the new ready file")
    second = run.ready()
    assert second["http_url"] == first["http_url"]
    assert ask_echo(address(second))["run_id"] == second["run_id"]

    stub = next(p for p, m in residue.find_stubs(second["run_id"]).items() if m == "echo")
    start = time.monotonic()
    os.kill(stub, signal.SIGKILL)
    output = run.output()
    assert time.monotonic() - start < 10
    assert run.process.returncode == 1
    assert "restarted: HTTP" in output
    assert "the stub of model 'echo'" in output
    assert "Traceback" not in output
    assert not run.ready_file.exists()
    for ready in (first, second):
        assert_nothing_left(ready["run_id"], int(ready["pid"]))


def test_stopped_while_loading(run_launch: Run, tmp_path: Path) -> None:
    models = tmp_path / "slow"
    mark = tmp_path / "loading"
    code = (
        "import pathlib, time\n"
        "class TritonPythonModel:\n"
        "    def initialize(self, args):\n"
        f"        pathlib.Path({str(mark)!r}).touch()\n"
        "        time.sleep(60)\n"
    )
    write_model(models, "slow", ECHO_CONFIG, code)
    run = run_launch(models=models)
    wait_until(mark.exists, 10, "the model to load")
    run.signal()
    assert run.output(timeout=10).endswith("stopped\n")
    assert run.process.returncode == 0


def test_errors_are_messages(run_launch: Run, tmp_path: Path) -> None:
    empty = run_launch(models=tmp_path / "nowhere")
    missing = run_launch(TRITON_BIN=str(tmp_path / "tritonserver"))
    for run, words in ((empty, "no model repository"), (missing, "TRITON_BIN")):
        output = run.output()
        assert run.process.returncode == 1
        assert output.startswith("error: ")
        assert words in output
        assert "Traceback" not in output
