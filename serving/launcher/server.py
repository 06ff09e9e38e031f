"""One supervised Triton server.

A dead stub never comes back by itself, the server's health stays "ready" and calls that wait for
the stub hang. Our three models depend on each other, so the honest recovery is to restart the whole
server: calls in flight get their connection reset, which is an error, never a hang.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine_configs.errors import BundleError, LaunchError
from serving.launcher import residue
from serving.tritonserver import TritonServer

WATCH_INTERVAL = 0.25  # s; a dead stub is noticed within this
RESTART_WINDOW = 600.0  # s
TAIL_LINES = 20


@dataclass(frozen=True)
class LaunchOptions:
    """How to run a repository. A port of 0 means: any free one. Times are in seconds."""

    host: str = "127.0.0.1"
    http_port: int = 0
    grpc_port: int = 0
    metrics_port: int = 0
    ready_timeout: float = 120.0
    drain_timeout: float = 30.0
    restarts: int = 3  # of a broken server within RESTART_WINDOW, before giving up
    ready_file: Path | None = None  # JSON: addresses and pid; there while the server is ready
    verbose: bool = False  # the server's log goes to stderr
    environment: Mapping[str, str] = field(default_factory=dict)


class Stopped(Exception):
    """request_stop() came while the server was starting."""


class Server:
    """Owns the server process, its stubs and its /dev/shm files from start() to stop().

    `on_ready` is called after the first start and after each restart.
    """

    def __init__(
        self,
        triton: TritonServer,
        repository: Path,
        options: LaunchOptions,
        on_ready: Callable[[Server], None] = lambda server: None,
    ) -> None:
        _check_repository(repository)
        self.repository, self.options = repository.resolve(), options
        self.failure: LaunchError | None = None
        self.restarts: list[float] = []  # times (monotonic) within the last RESTART_WINDOW
        self.run_id = ""
        self._triton, self._on_ready = triton, on_ready
        host = options.host
        self._ports = _choose_ports(
            host, options.http_port, options.grpc_port, options.metrics_port
        )
        self.http_address, self.grpc_address, self.metrics_address = (
            f"{host}:{port}" for port in self._ports
        )
        self.http_url = f"http://{self.http_address}"
        self.grpc_url = self.grpc_address  # as the gRPC clients want it, without a scheme
        self.metrics_url = f"http://{self.metrics_address}/metrics"
        # Appending: the server writes through the same open file that log_tail() seeks in.
        self._log = tempfile.TemporaryFile("a+b", prefix="hybrid-serve-")  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None
        self._stubs: dict[int, str] = {}
        self._ready, self._started = threading.Event(), threading.Event()
        self._stopping, self._ended = threading.Event(), threading.Event()
        # One thread from the first start to the end: the kernel ends the server with that thread.
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server was not started"
        return self._process.pid

    def stub_pids(self) -> dict[str, int]:
        """Model name -> pid of its stub (the last one, should a model have several instances)."""
        return {model: pid for pid, model in residue.find_stubs(self.run_id).items()}

    @property
    def ready(self) -> bool:
        """All models loaded and every stub alive, as far as the last look of the supervisor."""
        return self._ready.is_set()

    def start(self) -> None:
        """Returns when all models are ready; what raises (LaunchError, Stopped) leaves nothing."""
        self._supervisor.start()
        self._started.wait()
        if self.failure is not None:
            raise self.failure
        if not self.ready:
            raise Stopped

    def wait(self, timeout: float | None = None) -> bool:
        """Until request_stop(), or the server is given up (then `failure` says why)."""
        return self._ended.wait(timeout)

    def request_stop(self) -> None:
        """End wait(); safe in a signal handler."""
        self._stopping.set()
        self._ended.set()

    def kill(self) -> None:
        """No draining: a stop() in progress goes on at once. Safe in a signal handler."""
        self._stopping.set()
        if self._process is not None:
            self._process.kill()

    def stop(self) -> None:
        """Drain for at most `drain_timeout`; then no process and no /dev/shm file is left."""
        self.request_stop()
        if self._supervisor.is_alive():
            self._supervisor.join()
        self._log.close()

    def log_tail(self, lines: int = TAIL_LINES) -> str:
        """The server's last words: errors with what follows them, where there are any."""
        if self._log.closed:
            return ""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - (64 << 10)))
        text = self._log.read().decode(errors="replace").splitlines()
        return "\n".join((_error_lines(text) or text)[-lines:])

    def _start_once(self) -> None:
        self.run_id = uuid.uuid4().hex[:12]
        environment = {
            **os.environ,
            **self._triton.environment,
            **self.options.environment,
            residue.RUN_ID_VARIABLE: self.run_id,
        }
        output = None if self.options.verbose else self._log
        self._process = subprocess.Popen(
            self._command(),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C at a terminal is for us alone
        )
        self._wait_ready(self._process)
        self._stubs = residue.find_stubs(self.run_id)
        if self.options.ready_file is not None:
            self._write_ready_file(self.options.ready_file)
        self._ready.set()
        self._on_ready(self)

    def _write_ready_file(self, path: Path) -> None:
        content = {
            "http_url": self.http_url,
            "grpc_url": self.grpc_url,
            "metrics_url": self.metrics_url,
            "pid": self.pid,
            "run_id": self.run_id,
        }
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(content) + "\n")
        os.replace(part, path)

    def _command(self) -> list[str]:
        http_port, grpc_port, metrics_port = self._ports
        host = self.options.host
        prefix = residue.stub_region_prefix(self.run_id)
        # Should this process be killed, the kernel tells the server, which then ends by itself.
        setpriv = shutil.which("setpriv")
        command = [
            *([setpriv, "--pdeathsig", "TERM", "--"] if setpriv else []),
            str(self._triton.binary),
            f"--model-repository={self.repository}",
            f"--backend-config=python,shm-region-prefix-name={prefix}",
            f"--exit-timeout-secs={int(self.options.drain_timeout)}",
            f"--http-address={host}",
            f"--http-port={http_port}",
            f"--grpc-address={host}",
            f"--grpc-port={grpc_port}",
            f"--metrics-address={host}",
            f"--metrics-port={metrics_port}",
        ]
        if self._triton.backends is not None:
            command.append(f"--backend-directory={self._triton.backends}")
        return command

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + self.options.ready_timeout
        while not _is_ready(self.options.host, self._ports[0]):
            if self._stopping.wait(0.1):
                raise Stopped
            if process.poll() is not None:
                raise self._start_failure(f"ended with {_exit_text(process.returncode)}")
            if time.monotonic() > end:
                raise self._start_failure(f"was not ready in {self.options.ready_timeout:.0f} s")

    def _start_failure(self, what: str) -> LaunchError:
        return LaunchError(
            f"the Triton server {what}", where=str(self.repository), fix=self._log_hint()
        )

    def _log_hint(self) -> str:
        return "Its log is above." if self.options.verbose else f"Its log ends:\n{self.log_tail()}"

    def _supervise(self) -> None:
        try:
            self._start_once()
            self._started.set()
            self._watch()
            self._drain()
        except Stopped:
            pass
        except LaunchError as error:
            self.failure = error
        except OSError as error:  # no permission to run it, no room for the ready file
            self.failure = LaunchError(str(error), where=str(self.repository))
        finally:
            self._clear()
            self._started.set()
            self._ended.set()

    def _watch(self) -> None:
        """Restart what breaks until a stop is asked for. Raises LaunchError to give up."""
        while not self._stopping.wait(WATCH_INTERVAL):
            reason = self._broken()
            if reason is None:
                continue
            self._clear()
            now = time.monotonic()
            self.restarts = [t for t in self.restarts if now - t < RESTART_WINDOW]
            if len(self.restarts) >= self.options.restarts:
                raise LaunchError(
                    f"{reason}; restarts in the last {RESTART_WINDOW / 60:.0f} minutes: "
                    f"{len(self.restarts)}",
                    where=str(self.repository),
                    fix=self._log_hint(),
                )
            self.restarts.append(now)
            self._start_once()

    def _drain(self) -> None:
        """Running requests may end, new ones are refused."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self.options.drain_timeout + 5)

    def _broken(self) -> str | None:
        assert self._process is not None
        if self._process.poll() is not None:
            return f"the Triton server ended with {_exit_text(self._process.returncode)}"
        alive = residue.find_stubs(self.run_id)
        for pid, model in self._stubs.items():
            if pid not in alive:
                return f"the stub of model {model!r} (pid {pid}) died"
        return None

    def _clear(self) -> None:
        """No process and no file of the current run is left."""
        self._ready.clear()
        if self.options.ready_file is not None:
            self.options.ready_file.unlink(missing_ok=True)
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self.run_id:
            residue.remove(self.run_id)


def _check_repository(path: Path) -> None:
    if not path.is_dir() or not any(path.glob("*/config.pbtxt")):
        raise BundleError(
            "no model repository (a folder of models with a config.pbtxt each)",
            where=str(path),
            fix="Give the model_repository folder of a bundle; convert.py writes it.",
        )


def _choose_ports(host: str, *wanted: int) -> list[int]:
    """Each wanted port, or a free one for 0. Raises LaunchError when a wanted one is taken."""
    ports = []
    with contextlib.ExitStack() as held:  # all held at once, so that no port is given twice
        for port in wanted:
            listener = held.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((host, port))
            except OSError as error:
                raise LaunchError(
                    f"cannot listen on {host}:{port}: {error.strerror}",
                    fix="Choose another port or host; port 0 takes a free one.",
                ) from error
            ports.append(int(listener.getsockname()[1]))
    return ports


def _is_ready(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=2)
    try:
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _exit_text(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _error_lines(lines: list[str]) -> list[str]:
    """Triton begins each record with its level and date (E1201 …); what follows belongs to it."""
    kept, in_error = [], False
    for line in lines:
        if line[:1] in "IWE" and line[1:5].isdigit():
            in_error = line.startswith("E") and "CudaDriverHelper" not in line
        elif line.startswith("error:"):
            in_error = True
        if in_error and line.strip():
            kept.append(line)
    return kept
