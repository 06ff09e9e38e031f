"""Clients that go away, run late or are too many: nothing of theirs is kept."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from serving.client import TryAgain
from serving.tritonserver import PROJECT_ROOT
from tests.e2e.chain import Chain, wait_until

LONG: dict[str, Any] = {"max_tokens": 8000, "stream": True}
FREED_WITHIN = 1.0  # s, of which the gauges may be half a second late
CANCELLED = 'hybrid_requests_total{outcome="cancelled"}'


def over_grpc(chain: Chain) -> Iterator[dict[str, Any]]:
    with chain.client() as client:
        yield from client.stream("def main():", **LONG)


def over_sse(chain: Chain) -> Iterator[dict[str, Any]]:
    yield from chain.events("def main():", **LONG)


@pytest.mark.parametrize("open_stream", [over_grpc, over_sse])
def test_disconnect_after_the_first_piece_frees_all(
    chain: Chain, open_stream: Callable[[Chain], Any]
) -> None:
    before = chain.settled_metrics()[CANCELLED]
    stream = open_stream(chain)
    assert next(stream)["text_output"]
    wait_until(lambda: 'hybrid_engine_load{kind="running"}' in chain.held(), 5)
    stream.close()
    chain.wait_idle(FREED_WITHIN)
    assert chain.metrics()[CANCELLED] == before + 1


def test_deadline_of_an_unstreamed_call(chain: Chain) -> None:
    started = time.monotonic()
    status, answer = chain.reply({"text_input": "x", "max_tokens": 8000, "deadline_ms": 700})
    assert 0.7 <= time.monotonic() - started < 2
    assert status == 400
    assert "deadline" in answer["error"]
    chain.wait_idle(FREED_WITHIN)


@contextlib.contextmanager
def crowd(chain: Chain, size: int) -> Iterator[list[http.client.HTTPConnection]]:
    """Long streams, all in the engine; there are slots for 16 of them. None is left after it."""
    connections = []
    for _ in range(size):
        connections.append(http.client.HTTPConnection(chain.server.http_address))
        body = json.dumps({"text_input": "def main():", **LONG})
        connections[-1].request("POST", "/v2/models/llm/generate_stream", body)
    try:
        wait_until(lambda: in_engine(chain) == (16, size - 16), 20)
        yield connections
    finally:
        for connection in connections:
            connection.close()
        # The server notices that a client has gone when it next writes to it.
        chain.wait_idle(20)


def in_engine(chain: Chain) -> tuple[float, float]:
    held = chain.held()
    running, waiting = (
        held.get(f'hybrid_engine_load{{kind="{kind}"}}', 0) for kind in ("running", "waiting")
    )
    return running, waiting


def test_deadline_passes_while_waiting_for_a_slot(chain: Chain) -> None:
    """With more waiting than the server has threads for calls between models."""
    with crowd(chain, chain.max_requests - 4):
        started = time.monotonic()
        request = {"text_input": "x", "max_tokens": 8000, "deadline_ms": 300}
        assert "deadline" in chain.reply(request)[1]["error"]
        assert time.monotonic() - started < 3


def test_too_many_requests_are_refused_at_once(chain: Chain) -> None:
    full = f"overloaded: {chain.max_requests} requests are running, try later"
    with crowd(chain, chain.max_requests):
        started = time.monotonic()
        status, answer = chain.reply({"text_input": "x", "max_tokens": 1})
        assert time.monotonic() - started < 1
        assert (status, answer["error"]) == (400, full)
        with chain.client() as client, pytest.raises(TryAgain, match="overloaded"):
            client.generate("x", retries=1)
    # They left: the next one is served.
    assert chain.generate("x", max_tokens=1)["generated_tokens"] == 1


def test_client_waits_until_there_is_room(chain: Chain) -> None:
    answers: list[dict[str, Any]] = []

    def ask() -> None:
        with chain.client() as client:
            answers.append(client.generate("x", retries=60, max_tokens=1))

    with crowd(chain, chain.max_requests):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(1)
        assert thread.is_alive()
    thread.join(10)
    assert [a["generated_tokens"] for a in answers] == [1]


# Clients in processes of their own, so that they can be killed. One line per answer.
OVER_GRPC = """
import sys
from serving.client import Client
with Client(sys.argv[1]) as client:
    for turn in range(1_000_000):
        prompt = "import os\\n" * (1 + (turn * 7 + int(sys.argv[2])) % 40)
        for _ in client.stream(prompt, stream=True, max_tokens=40, replay_ratio=0.1):
            pass
        print(turn, flush=True)
"""
OVER_SSE = """
import http.client, json, sys
for turn in range(1_000_000):
    prompt = "import os\\n" * (1 + (turn * 7 + int(sys.argv[2])) % 40)
    body = {"text_input": prompt, "stream": True, "max_tokens": 40, "replay_ratio": 0.1}
    connection = http.client.HTTPConnection(sys.argv[1])
    connection.request("POST", "/v2/models/llm/generate_stream", json.dumps(body))
    assert b"finish_reason" in connection.getresponse().read()
    connection.close()
    print(turn, flush=True)
"""


def run_client(chain: Chain, seed: int) -> subprocess.Popen[str]:
    server = chain.server
    code, address = (OVER_SSE, server.http_address) if seed % 2 else (OVER_GRPC, server.grpc_url)
    command = [sys.executable, "-c", code, address, str(seed)]
    return subprocess.Popen(command, cwd=PROJECT_ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("clients", "seconds"),
    [(8, 10), pytest.param(32, 60, marks=[pytest.mark.full, pytest.mark.timeout(400)])],
)
def test_clients_killed_one_a_second_leak_nothing(chain: Chain, clients: int, seconds: int) -> None:
    """The good ones go on meanwhile; afterwards the processes are as large as before."""
    stubs = chain.server.stub_pids()
    running = [run_client(chain, seed) for seed in range(clients)]
    try:
        for client in running:
            assert client.stdout is not None
            assert client.stdout.readline() == "0\n", "a client got no answer"
        threads, size = threads_of(stubs), memory_of(stubs)
        for second in range(seconds):
            time.sleep(1)
            victim = random.Random(second).randrange(clients)
            running[victim].send_signal(signal.SIGKILL)
            running[victim].wait()
            running[victim] = run_client(chain, second)
    finally:
        for client in running:
            client.kill()
            client.wait()
    chain.wait_idle(5)
    assert chain.server.stub_pids() == stubs, "a model was restarted"
    assert threads_of(stubs) <= threads + 2
    assert memory_of(stubs) < size + (48 << 20)
    assert chain.generate("def main():", max_tokens=4)["generated_tokens"] == 4


def threads_of(stubs: dict[str, int]) -> int:
    return sum(len(os.listdir(f"/proc/{pid}/task")) for pid in stubs.values())


def memory_of(stubs: dict[str, int]) -> int:
    """Anonymous memory, bytes: the arena is shared and fills."""
    total = 0
    for pid in stubs.values():
        with open(f"/proc/{pid}/status") as status:
            total += next(int(line.split()[1]) << 10 for line in status if "RssAnon" in line)
    return total


def test_streams_dropped_at_any_moment(chain: Chain) -> None:
    """While a prompt waits, is computed, is answered, has just ended."""
    before = chain.server.run_id
    errors: list[BaseException] = []

    def drop(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(6):
                prompt = "class A: pass\n" * rng.randint(1, 150)
                stream = chain.events(prompt, max_tokens=rng.choice((1, 5, 400)))
                for _ in range(rng.randint(0, 6)):
                    next(stream, None)
                stream.close()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=drop, args=(seed,)) for seed in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert errors == []
    chain.wait_idle(5)
    assert chain.server.run_id == before
