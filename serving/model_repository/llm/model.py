"""The public model: text in, text out. Checks every request, then drives the engine.

A pool thread per request iterates over the engine's responses; one watcher thread looks for
clients that have gone and deadlines that have passed, and tells the engine.
"""

import dataclasses
import json
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[3] / "python"))

import numpy as np
from numpy.typing import NDArray

from engine_configs.errors import HybridServeError, RequestError
from serving import triton_edge as edge
from serving.deploy import bundle_path, from_parameters
from serving.engine.bundle import Bundle
from serving.engine.text import Text, TextStream
from serving.interface import INPUTS, OUTPUTS, TextRequest, parse

WATCH_SECONDS = 0.02


@dataclasses.dataclass(frozen=True)
class LlmConfig:
    """max_requests: running at once, one more is refused; deadline_ms: where none is given."""

    max_requests: int = 64
    deadline_ms: int = 600_000


class Reply:
    """The responses of one request.

    After the final one the server frees what ``is_cancelled`` reads, and asking again would crash
    the whole server: both take the same lock.
    """

    def __init__(self, sender: Any, deadline: float) -> None:
        self._sender, self.deadline = sender, deadline
        self._lock, self._closed = threading.Lock(), False
        self.expired = False

    def piece(self, outputs: list[Any]) -> None:
        with self._lock:
            if not self._closed:
                self._sender.send(edge.response(outputs))

    def finish(self, outputs: list[Any]) -> None:
        self._final(edge.response(outputs))

    def fail(self, code: str, message: str) -> None:
        self._final(edge.error_response(code, message))

    def unwanted(self) -> bool:
        """The client has gone, or the deadline has passed."""
        with self._lock:
            if self._closed:
                return False
            self.expired = time.monotonic() > self.deadline
            return self.expired or bool(self._sender.is_cancelled())

    def _final(self, response: Any) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._sender.send(response, flags=edge.FINAL)


class EngineError(Exception):
    """What the engine answered instead of tokens."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.config = from_parameters(LlmConfig, args)
        bundle = Bundle.open(bundle_path(__file__))
        self.text, self.stops = Text(bundle.path), bundle.spec.eos_token_ids
        self.pool = ThreadPoolExecutor(self.config.max_requests, thread_name_prefix="request")
        self.free = threading.BoundedSemaphore(self.config.max_requests)
        self.running: dict[str, Reply] = {}
        self.stopping = threading.Event()
        self.watcher = threading.Thread(target=self.watch, name="watcher", daemon=True)
        self.watcher.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            received = time.monotonic()
            reply = Reply(request.get_response_sender(), received + self.config.deadline_ms / 1e3)
            try:
                wanted = self.read(request)
            except HybridServeError as e:
                reply.fail("INVALID_ARG", str(e))
                continue
            except Exception as e:
                reply.fail("INTERNAL", edge.internal_error(e))
                continue
            if not self.free.acquire(blocking=False):
                limit = self.config.max_requests
                reply.fail("UNAVAILABLE", f"overloaded: {limit} requests are running, try later")
                continue
            if wanted.deadline is not None:
                reply.deadline = received + wanted.deadline
            self.pool.submit(self.answer, reply, wanted)

    def read(self, request: Any) -> TextRequest:
        unknown = sorted(k for k in edge.parameters(request) if not k.startswith("triton_"))
        if unknown:
            known = ", ".join(t.name for t in INPUTS)
            raise RequestError(f"unknown field {unknown[0]!r}", fix=f"Known: {known}")
        return parse({t.name: edge.array(request, t.name) for t in INPUTS})

    def answer(self, reply: Reply, wanted: TextRequest) -> None:
        name = uuid.uuid4().hex
        self.running[name] = reply
        try:
            self.generate(reply, wanted, name)
        except EngineError as e:
            late = reply.expired and e.code == "CANCELLED"
            reply.fail(e.code, "deadline exceeded" if late else str(e))
        except HybridServeError as e:
            reply.fail("INVALID_ARG", str(e))
        except Exception as e:
            reply.fail("INTERNAL", edge.internal_error(e))
        finally:
            del self.running[name]
            self.free.release()

    def generate(self, reply: Reply, wanted: TextRequest, name: str) -> None:
        """One request: tokens of the prompt to the engine, text of the answer to the client."""
        tokens = np.asarray(self.text.encode(wanted.prompt), np.int64)
        out = TextStream(self.text, wanted.stop_words)
        log_probs: list[float] = []
        pieces = [wanted.prompt] if wanted.echo else []
        result: dict[str, Any] = {}
        stopping = False
        for response in self.call_engine(tokens, wanted, name):
            if response.has_error():
                raise EngineError("INTERNAL", "the engine is not available")
            result = json.loads(edge.text(response, "result") or "{}")
            if "error" in result:
                raise EngineError(result["code"], result["error"])
            ids = edge.array(response, "token_ids")
            probabilities = edge.array(response, "log_probs")
            log_probs += [] if probabilities is None else probabilities.tolist()
            for token in [] if ids is None else ids.tolist():
                pieces.append(out.push(token))
            if out.stopped and not stopping and not result:
                stopping = True
                cancel(name)
            if wanted.stream and not result and any(pieces):
                reply.piece(self.outputs("".join(pieces), log_probs, {}))
                pieces, log_probs = [], []
        stopped = out.stopped
        pieces.append(out.finish())
        if result.get("reason") == "cancelled" and not stopped:
            raise EngineError("CANCELLED", "cancelled")
        result["reason"] = "stop_word" if stopped else result.get("reason", "")
        reply.finish(self.outputs("".join(pieces), log_probs, result))

    def call_engine(self, tokens: NDArray[np.int64], wanted: TextRequest, name: str) -> Any:
        sampling = dataclasses.asdict(wanted.sampling)
        sampling["stop_tokens"] = [*wanted.sampling.stop_tokens, *self.stops]
        sampling["bad_tokens"] = [self.text.encode(w) for w in wanted.bad_words]
        args = {
            "id": name,
            "sampling": sampling,
            "replay": [str(wanted.replay.mode), wanted.replay.amount],
            "cache_salt": wanted.cache_salt,
        }
        inputs = [
            edge.tensor("tokens", "INT64", tokens),
            edge.tensor("args", "STRING", json.dumps(args)),
        ]
        outputs = ["token_ids", "log_probs", "result"]
        return edge.infer("engine", inputs, outputs, decoupled=True)

    def outputs(self, text: str, log_probs: list[float], result: dict[str, Any]) -> list[Any]:
        values: dict[str, Any] = {"text_output": text, "finish_reason": result.get("reason")}
        values["output_log_probs"] = log_probs or None
        values |= {t.name: result.get(t.name) for t in OUTPUTS if t.name not in values}
        kinds = {t.name: t.kind for t in OUTPUTS}
        return [edge.tensor(n, kinds[n], v) for n, v in values.items() if v is not None]

    def watch(self) -> None:
        """Cancel again at each look: the first may come before the engine knows the request."""
        while not self.stopping.wait(WATCH_SECONDS):
            for name, reply in dict(self.running).items():
                try:
                    if reply.unwanted():
                        cancel(name)
                except Exception as e:
                    edge.internal_error(e)

    def finalize(self) -> None:
        self.stopping.set()
        self.watcher.join(timeout=1)
        self.pool.shutdown(wait=False)


def cancel(name: str) -> None:
    """The engine ends the sequence at its next step."""
    args = edge.tensor("args", "STRING", json.dumps({"id": name}))
    inputs = [edge.tensor("op", "STRING", "cancel"), args]
    for _ in edge.infer("engine", inputs, ["result"], decoupled=True):
        pass
