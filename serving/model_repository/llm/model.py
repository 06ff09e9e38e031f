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
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# The bundle's own copy of the code, whatever else is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "python"))

import numpy as np
from numpy.typing import NDArray

from engine_configs.errors import ConfigError, HybridServeError, RequestError
from serving import triton_edge as edge
from serving.deploy import bundle_path, from_parameters
from serving.engine.bundle import Bundle
from serving.engine.text import Text, TextStream
from serving.interface import INPUTS, OUTPUTS, TextRequest, parse
from serving.replay.policy import default_replay

KINDS = {t.name: t.kind for t in OUTPUTS}
WATCH_SECONDS = (0.02, 0.2)  # between two looks at all requests, each of which is a call
WATCH_SHARE = 0.25  # of the watcher's time that looking may take
RETIRE_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class LlmConfig:
    """max_requests: running at once, one more is refused; deadline_ms: where none is given."""

    max_requests: int = 64
    deadline_ms: int = 600_000

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value < 1:
                raise ConfigError(f"{name} = {value}, must be >= 1", where="llm")


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


@dataclasses.dataclass
class Answer:
    """What was generated and not yet sent. Tokens after a stop word do not count."""

    text: TextStream
    pieces: list[str] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)
    tokens: int = 0

    def add(self, ids: NDArray[Any] | None, log_probs: NDArray[Any] | None) -> None:
        for i, token in enumerate([] if ids is None else ids.tolist()):
            if self.text.stopped:
                return
            self.pieces.append(self.text.push(token))
            self.tokens += 1
            if log_probs is not None:
                self.log_probs.append(float(log_probs[i]))

    def take(self) -> tuple[str, list[float]]:
        taken = "".join(self.pieces), self.log_probs
        self.pieces, self.log_probs = [], []
        return taken


class EngineError(Exception):
    """What the engine answered instead of tokens."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"overloaded: {message}" if code == "UNAVAILABLE" else message)
        self.code = code


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.config = from_parameters(LlmConfig, args)
        bundle = Bundle.open(bundle_path(__file__))
        self.text, self.spec = Text(bundle.path), bundle.spec
        self.replay = default_replay(bundle.calibration)
        if not bundle.calibration.known:
            edge.log_warning(f"{bundle.calibration.verdict}; the default is exact")
        self.pool = ThreadPoolExecutor(self.config.max_requests, thread_name_prefix="request")
        self.free = threading.BoundedSemaphore(self.config.max_requests)
        self.running: dict[str, Reply] = {}
        # Finished iterators over the engine's responses, and when they finished. The server's own
        # thread drops its reference to them without holding the interpreter's lock: if it is the
        # last one, Python objects are freed beside running Python code, and memory is corrupted.
        self.retired: deque[tuple[float, Any]] = deque()
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
        tensors = {t.name: edge.array(request, t.name) for t in INPUTS}
        return parse(tensors, self.spec.vocab_size, self.replay)

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
        answer = Answer(TextStream(self.text, wanted.stop_words))
        if wanted.echo:
            answer.pieces.append(wanted.prompt)
        result: dict[str, Any] = {}
        responses = self.call_engine(tokens, wanted, name)
        try:
            for response in responses:
                result = read_result(response)
                stopped = answer.text.stopped
                ids, log_probs = (edge.array(response, n) for n in ("token_ids", "log_probs"))
                answer.add(ids, log_probs)
                if answer.text.stopped and not stopped and not result:
                    call_off([name], "stop")
                if wanted.stream and not result and any(answer.pieces):
                    reply.piece(outputs(*answer.take(), {}))
        except EngineError:
            raise
        except Exception:
            call_off([name], "cancel")
            for _ in responses:  # to the last one: it must not be dropped before
                pass
            raise
        finally:
            self.retired.append((time.monotonic(), responses))
        answer.pieces.append(answer.text.finish())
        if answer.text.stopped:
            result |= {"reason": "stop_word", "generated_tokens": answer.tokens}
        elif result.get("reason") == "cancelled":
            raise EngineError("CANCELLED", "cancelled")
        reply.finish(outputs(*answer.take(), result))

    def call_engine(self, tokens: NDArray[np.int64], wanted: TextRequest, name: str) -> Any:
        sampling = dataclasses.asdict(wanted.sampling)
        sampling["stop_tokens"] = [*wanted.sampling.stop_tokens, *self.spec.eos_token_ids]
        sampling["bad_tokens"] = [self.text.encode(w) for w in wanted.bad_words]
        args = {
            "id": name,
            "sampling": sampling,
            "replay": [str(wanted.replay.mode), wanted.replay.amount],
            "compression": dataclasses.asdict(wanted.compression),
            "cache_salt": wanted.cache_salt,
        }
        inputs = [
            edge.tensor("tokens", "INT64", tokens),
            edge.tensor("args", "STRING", json.dumps(args)),
        ]
        outputs = ["token_ids", "log_probs", "result"]
        return edge.infer("engine", inputs, outputs, decoupled=True)

    def watch(self) -> None:
        """Cancel again at each look: the first may come before the engine knows the request."""
        shortest, longest = WATCH_SECONDS
        pause = shortest
        while not self.stopping.wait(pause):
            started = time.monotonic()
            try:
                unwanted = [name for name, r in dict(self.running).items() if r.unwanted()]
                pause = min(longest, max(shortest, (time.monotonic() - started) / WATCH_SHARE))
                if unwanted:
                    call_off(unwanted, "cancel")
            except Exception as e:
                edge.internal_error(e)
            while self.retired and self.retired[0][0] < time.monotonic() - RETIRE_SECONDS:
                self.retired.popleft()

    def finalize(self) -> None:
        self.stopping.set()
        self.watcher.join(timeout=1)
        self.pool.shutdown(wait=False)


def read_result(response: Any) -> dict[str, Any]:
    """How the answer ended, {} while it goes on. Raises EngineError for what is no answer."""
    if response.has_error():
        raise EngineError("INTERNAL", "the engine is not available")
    result: dict[str, Any] = json.loads(edge.text(response, "result") or "{}")
    if "error" in result:
        raise EngineError(result["code"], result["error"])
    return result


def outputs(text: str, log_probs: list[float], result: dict[str, Any]) -> list[Any]:
    values: dict[str, Any] = {"text_output": text}
    if log_probs:
        values["output_log_probs"] = log_probs
    if result:
        values["finish_reason"] = result["reason"]
        values |= {t.name: result[t.name] for t in OUTPUTS if t.name in result}
    return [edge.tensor(name, KINDS[name], value) for name, value in values.items()]


def call_off(names: list[str], op: str) -> None:
    """``cancel`` or ``stop`` (the answer is whole): the engine ends them at its next step."""
    args = edge.tensor("args", "STRING", json.dumps({"ids": names}))
    inputs = [edge.tensor("op", "STRING", op), args]
    for _ in edge.infer("engine", inputs, ["result"], decoupled=True):
        pass
