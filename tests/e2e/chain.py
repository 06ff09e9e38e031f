"""A running chain and the ways into it: HTTP, server-sent events, gRPC; and a look at its state."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from serving.client import Client
from serving.launch import Server

Fields = dict[str, Any]
Reply = tuple[int, dict[str, Any]]


@dataclass
class Chain:
    server: Server
    max_requests: int

    def post(self, verb: str, body: Fields | bytes, model: str = "llm", timeout: float = 60) -> Any:
        """The open connection and its response; the caller closes the connection."""
        connection = http.client.HTTPConnection(self.server.http_address, timeout=timeout)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", f"/v2/models/{model}/{verb}", data)
        return connection, connection.getresponse()

    def reply(self, body: Fields | bytes, verb: str = "generate") -> Reply:
        connection, response = self.post(verb, body)
        with contextlib.closing(connection):
            return response.status, json.loads(response.read())

    def generate(self, text_input: str, **fields: Any) -> dict[str, Any]:
        status, answer = self.reply({"text_input": text_input, **fields})
        assert (status, "error" in answer) == (200, False), answer
        return answer

    def events(self, text_input: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """generate_stream; leaving early closes the connection."""
        body = {"text_input": text_input, "stream": True, **fields}
        connection, response = self.post("generate_stream", body)
        with contextlib.closing(connection):
            for line in response:
                if line.strip():
                    yield json.loads(line.removeprefix(b"data: "))

    def client(self) -> Client:
        return Client(self.server.grpc_url)

    def metrics(self) -> dict[str, float]:
        """Ours, by name and labels, as they are now."""
        with urllib.request.urlopen(self.server.metrics_url, timeout=10) as page:
            lines = page.read().decode().splitlines()
        rows = (line.rsplit(" ", 1) for line in lines if line.startswith("hybrid_"))
        return {name: float(value) for name, value in rows}

    def held(self) -> dict[str, float]:
        """What running requests hold; empty when the chain is idle."""
        kinds = ("hybrid_engine_load{", "hybrid_cache_leases{")
        pinned = 'hybrid_cache_slots{pool="blocks",state="pinned"}'
        metrics = self.metrics()
        return {k: v for k, v in metrics.items() if (k.startswith(kinds) or k == pinned) and v}

    def wait_idle(self, seconds: float) -> float:
        """Seconds it took. The gauges are set twice a second, so it takes that even when idle."""
        started = time.monotonic()
        wait_until(lambda: not self.held(), seconds, lambda: f"still held: {self.held()}")
        return time.monotonic() - started

    def settled_metrics(self) -> dict[str, float]:
        """Once all answers so far are counted: the cache's counters are half a second late."""
        time.sleep(0.7)
        return self.metrics()

    def salt(self) -> str:
        """A part of the cache that nobody has used."""
        return uuid.uuid4().hex


def wait_until(
    condition: Callable[[], object], seconds: float, what: Callable[[], str] = lambda: ""
) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s; {what()}"
        time.sleep(0.02)
