"""Models that die: calls in flight end with an error, the service is back and right."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine_configs.errors import ServerError
from tests.e2e.chain import Chain, wait_until

BACK_WITHIN = 10.0  # s, on a machine that has a core for each runnable process
PROMPT = "def main():"
LONG: dict[str, Any] = {"max_tokens": 8000, "stream": True}


class Call:
    """A call in a thread, and how it ended."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self.thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self.result = call()
        except Exception as e:
            self.error = e

    def end(self, seconds: float) -> Call:
        self.thread.join(seconds)
        assert not self.thread.is_alive(), "the call hangs"
        return self


def over_grpc(chain: Chain) -> None:
    with chain.client() as client:
        list(client.stream(PROMPT, **LONG))


def over_sse(chain: Chain) -> None:
    """Read to the end; http.client does not tell a stream that was cut from a whole one."""
    last = list(chain.events(PROMPT, **LONG))[-1]
    if "finish_reason" not in last:
        raise ServerError("the stream was cut")


def unstreamed(chain: Chain) -> None:
    chain.generate(PROMPT, max_tokens=8000)


@pytest.fixture
def expected(chain: Chain) -> Iterator[str]:
    """The right answer; after the test the service gives it again, in time."""
    answer = chain.generate(PROMPT, max_tokens=16)["text_output"]
    yield answer
    assert chain.generate(PROMPT, max_tokens=16)["text_output"] == answer
    chain.server.restarts.clear()


@contextlib.contextmanager
def restarting(chain: Chain) -> Iterator[None]:
    """Around what breaks the service: it must be back in time, with new processes."""
    run, started = chain.server.run_id, time.monotonic()
    yield
    wait_until(lambda: chain.server.run_id != run and chain.server.ready, 120)
    took = time.monotonic() - started
    assert took < limit(), f"back after {took:.1f} s"


def limit() -> float:
    """A restart is work for the processor: it takes longer where others want it, too."""
    return BACK_WITHIN * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@pytest.mark.parametrize("model", ["engine", "prefix_cache", "llm"])
def test_killed_in_mid_stream(chain: Chain, expected: str, model: str) -> None:
    calls = [Call(lambda c=c: c(chain)) for c in (over_grpc, over_sse, unstreamed)]  # type: ignore[misc]
    running = 'hybrid_engine_load{kind="running"}'
    wait_until(lambda: chain.held().get(running) == len(calls), 10)
    with restarting(chain):
        os.kill(chain.server.stub_pids()[model], signal.SIGKILL)
        for call in calls:
            error = call.end(5).error
            assert isinstance(error, ServerError | http.client.HTTPException | OSError), error


def test_cache_killed_while_a_prompt_is_looked_up(chain: Chain, expected: str) -> None:
    """The engine waits for the answer of a cache that dies."""
    pid = chain.server.stub_pids()["prefix_cache"]
    os.kill(pid, signal.SIGSTOP)
    call = Call(lambda: over_grpc(chain))
    time.sleep(0.5)
    assert call.thread.is_alive()
    with restarting(chain):
        os.kill(pid, signal.SIGKILL)
        assert isinstance(call.end(5).error, ServerError)


def test_client_that_retries_gets_its_answer_through_a_restart(chain: Chain, expected: str) -> None:
    def ask() -> dict[str, Any]:
        with chain.client() as client:
            long = client.generate(PROMPT, retries=60, max_tokens=1500)
            return {**long, "text_output": long["text_output"][:16]}

    call = Call(ask)
    wait_until(chain.held, 10)
    with restarting(chain):
        os.kill(chain.server.stub_pids()["engine"], signal.SIGKILL)
        call.end(60)
    assert call.error is None
    assert call.result["generated_tokens"] == 1500
    assert call.result["text_output"] == expected[:16]


def test_what_the_server_refuses_is_not_retried(chain: Chain) -> None:
    started = time.monotonic()
    with chain.client() as client, pytest.raises(ServerError, match="top_p"):
        client.generate(PROMPT, retries=100, top_p=2.0)
    assert time.monotonic() - started < 1
