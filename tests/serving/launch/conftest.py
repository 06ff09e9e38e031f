"""A repository of two small Python models, and runs of `python -m serving.launch`."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from serving.launcher import residue
from serving.tritonserver import PROJECT_ROOT

# Answers with what its process sees; keeps an arena file like the real models do.
ECHO = """
import json, os
import numpy as np
import triton_python_backend_utils as pb_utils
import serving  # only there when PYTHONPATH names the project

class TritonPythonModel:
    def initialize(self, args):
        run_id = os.environ["HYBRID_SERVE_RUN_ID"]
        self.arena = open(f"/dev/shm/hybrid-serve-{run_id}-arena", "w+b")

    def execute(self, requests):
        run_id = os.environ["HYBRID_SERVE_RUN_ID"]
        seen = json.dumps({"serving": serving.__file__, "run_id": run_id})
        tensor = pb_utils.Tensor("seen", np.array([seen], dtype=object))
        return [pb_utils.InferenceResponse([tensor]) for _ in requests]
"""

# One number each 0.1 s, from a thread, so that a killed stub leaves a stream in flight.
COUNT = """
import threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            wanted = int(pb_utils.get_input_tensor_by_name(request, "wanted").as_numpy()[0])
            sender = request.get_response_sender()
            threading.Thread(target=self.count, args=(sender, wanted), daemon=True).start()

    def count(self, sender, wanted):
        for i in range(wanted):
            time.sleep(0.1)
            tensor = pb_utils.Tensor("number", np.array([i], dtype=np.int64))
            sender.send(pb_utils.InferenceResponse([tensor]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

ECHO_CONFIG = """
backend: "python"
input [ { name: "unused" data_type: TYPE_INT64 dims: [1] } ]
output [ { name: "seen" data_type: TYPE_STRING dims: [1] } ]
instance_group [ { kind: KIND_CPU } ]
"""
COUNT_CONFIG = """
backend: "python"
model_transaction_policy { decoupled: true }
input [ { name: "wanted" data_type: TYPE_INT64 dims: [1] } ]
output [ { name: "number" data_type: TYPE_INT64 dims: [1] } ]
instance_group [ { kind: KIND_CPU } ]
"""


def write_model(repository: Path, name: str, config: str, code: str) -> None:
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(code)
    (version.parent / "config.pbtxt").write_text(config)


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model_repository")
    write_model(path, "echo", ECHO_CONFIG, ECHO)
    write_model(path, "count", COUNT_CONFIG, COUNT)
    return path


def post(address: str, path: str, body: dict[str, Any], timeout: float = 10) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=timeout)
    try:
        connection.request("POST", path, json.dumps(body))
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def ask_echo(address: str) -> dict[str, str]:
    status, text = post(address, "/v2/models/echo/generate", {"unused": 1})
    assert status == 200, text
    seen: dict[str, str] = json.loads(json.loads(text)["seen"])
    return seen


@dataclass
class Stream:
    """A generate_stream call in a thread; read raw, as http.client hides that a stream was cut."""

    address: str
    wanted: int
    received: bytes = b""

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        host, _, port = self.address.partition(":")
        body = json.dumps({"wanted": self.wanted})
        with (
            socket.create_connection((host, int(port)), timeout=60) as connection,
            contextlib.suppress(ConnectionResetError),
        ):
            connection.sendall(
                "POST /v2/models/count/generate_stream HTTP/1.1\r\nHost: test\r\n"
                f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            while not self.complete and (part := connection.recv(4096)):
                self.received += part

    @property
    def events(self) -> int:
        return self.received.count(b"data:")

    @property
    def complete(self) -> bool:
        """The last, empty chunk came: the answer is whole."""
        return self.received.endswith(b"\r\n0\r\n\r\n")

    def wait_for_events(self, count: int) -> None:
        wait_until(lambda: self.events >= count, 10, "the stream's first events")


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.02)


def shared_memory_files(run_id: str) -> list[str]:
    prefix = residue.file_prefix(run_id)
    return [path.name for path in residue.SHARED_MEMORY.iterdir() if path.name.startswith(prefix)]


def assert_nothing_left(run_id: str, pid: int) -> None:
    assert residue.find_stubs(run_id) == {}
    assert shared_memory_files(run_id) == []
    assert not Path(f"/proc/{pid}").exists(), "the server's process is still there"


class Launched:
    """`python -m serving.launch` as a child process."""

    def __init__(self, repository: Path, folder: Path, *arguments: str, **environment: str) -> None:
        self.ready_file = folder / "ready.json"
        self.started = time.monotonic()
        command = [sys.executable, "-m", "serving.launch", str(repository)]
        self.process = subprocess.Popen(
            [*command, "--ready-file", str(self.ready_file), *arguments],
            cwd=PROJECT_ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ready(self) -> dict[str, Any]:
        wait_until(
            lambda: self.ready_file.exists() or self.process.poll() is not None, 30, "readiness"
        )
        assert self.process.poll() is None, self.output()
        content: dict[str, Any] = json.loads(self.ready_file.read_text())
        return content

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def output(self, timeout: float = 20) -> str:
        """All that it printed, once it has ended."""
        return self.process.communicate(timeout=timeout)[0]


@pytest.fixture
def run_launch(repository: Path, tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    launched: list[Launched] = []

    def start(*arguments: str, models: Path = repository, **environment: str) -> Launched:
        launched.append(Launched(models, tmp_path, *arguments, **environment))
        return launched[-1]

    yield start
    for one in launched:
        if one.process.poll() is None:
            one.process.terminate()
            try:
                one.process.wait(15)
            except subprocess.TimeoutExpired:
                one.process.kill()
