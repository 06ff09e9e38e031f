"""launch() in this process: readiness, what the models see, recovery."""

from __future__ import annotations

import os
import queue
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from engine_configs.errors import BundleError, LaunchError
from serving.launch import LaunchOptions, Server, launch
from serving.tritonserver import PROJECT_ROOT

from .conftest import (
    ECHO_CONFIG,
    Stream,
    ask_echo,
    assert_nothing_left,
    post,
    shared_memory_files,
    wait_until,
    write_model,
)


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    with launch(repository) as running:
        yield running
    assert_nothing_left(running.run_id, running.pid)


def test_models_answer_and_see_the_project(server: Server) -> None:
    seen = ask_echo(server.http_address)
    assert Path(seen["serving"]).parent == PROJECT_ROOT / "serving"
    assert seen["run_id"] == server.run_id
    assert triton_grpc.InferenceServerClient(server.grpc_url).is_model_ready("count")
    assert post(server.metrics_address, "/metrics", {})[0] in (200, 405)


def test_listens_on_loopback_only(server: Server) -> None:
    ports = [int(a.rpartition(":")[2]) for a in (server.http_address, server.grpc_address)]
    for port in ports:
        with socket.create_connection(("127.0.0.1", port), timeout=2):
            pass
        # All of 127/8 is this machine: a server on 0.0.0.0 would answer here as well.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=2)


def test_stub_processes_and_arena_are_known(server: Server) -> None:
    stubs = server.stub_pids()
    assert set(stubs) == {"echo", "count"}
    assert all(Path(f"/proc/{pid}").exists() for pid in stubs.values())
    assert any(name.endswith("-arena") for name in shared_memory_files(server.run_id))


Answers = queue.Queue[object]


def grpc_stream(server: Server, wanted: int) -> tuple[triton_grpc.InferenceServerClient, Answers]:
    """Puts None for each answer, the error when one comes."""
    answers: Answers = queue.Queue()
    client = triton_grpc.InferenceServerClient(server.grpc_url)
    client.start_stream(lambda result, error: answers.put(error))
    tensor = triton_grpc.InferInput("wanted", [1], "INT64")
    tensor.set_data_from_numpy(np.array([wanted], dtype=np.int64))
    client.async_stream_infer("count", [tensor])
    return client, answers


def test_killed_stub_errs_calls_in_flight_and_recovers(server: Server) -> None:
    pid, run_id = server.pid, server.run_id
    stream = Stream(server.http_address, wanted=600)  # a minute
    client, answers = grpc_stream(server, wanted=600)
    stream.wait_for_events(2)
    assert answers.get(timeout=5) is None
    killed_at = time.monotonic()
    os.kill(server.stub_pids()["count"], signal.SIGKILL)

    error = next(e for e in iter(lambda: answers.get(timeout=10), "never") if e is not None)
    assert "UNAVAILABLE" in str(error)
    stream.thread.join(10)
    assert not stream.thread.is_alive()
    assert not stream.complete, "the HTTP stream ended as if it were whole"
    client.stop_stream(cancel_requests=True)
    wait_until(lambda: server.run_id != run_id and server.ready, 10, "the restart")
    assert ask_echo(server.http_address)["run_id"] == server.run_id
    assert time.monotonic() - killed_at < 10
    assert_nothing_left(run_id, pid)


def test_crashed_server_recovers_and_its_stubs_are_removed(server: Server) -> None:
    pid, run_id = server.pid, server.run_id
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: server.run_id != run_id and server.ready, 10, "the restart")
    assert ask_echo(server.http_address)["run_id"] == server.run_id
    assert_nothing_left(run_id, pid)


def test_model_that_fails_to_load_says_why(tmp_path: Path) -> None:
    code = (
        "class TritonPythonModel:\n"
        "    def initialize(self, args):\n"
        "        raise RuntimeError('the weights are on the moon')\n"
    )
    write_model(tmp_path, "broken", ECHO_CONFIG, code)
    with pytest.raises(LaunchError, match="the weights are on the moon"), launch(tmp_path):
        pass


@pytest.mark.parametrize("models", [(), ("notes",)])
def test_not_a_repository(tmp_path: Path, models: tuple[str, ...]) -> None:
    for name in models:
        (tmp_path / name).mkdir()
    target = tmp_path if models else tmp_path / "missing"
    with pytest.raises(BundleError, match=r"no model repository.*convert\.py"), launch(target):
        pass


def test_taken_port_is_named(repository: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        options = LaunchOptions(grpc_port=port)
        with pytest.raises(LaunchError, match=f"127.0.0.1:{port}"), launch(repository, options):
            pass
