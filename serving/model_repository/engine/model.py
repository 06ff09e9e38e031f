"""The engine as a Triton model: token ids in, token ids out as they are made.

Errors travel as data (``result``): an error response to a decoupled caller inside the server is
lost on some server versions and leaves the caller waiting for ever. Callers inside the server are
never told of a client's disconnect either, so they send ``op = cancel``; ``op = stop`` says that
the answer is complete.
"""

import contextlib
import dataclasses
import json
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

# The bundle's own copy of the code, whatever else is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "python"))

import numpy as np

from engine_configs.errors import CancelledError, HybridServeError, OverloadedError, RequestError
from serving import triton_edge as edge
from serving.deploy import bundle_path, from_parameters
from serving.engine.bundle import Bundle
from serving.engine.engine import Engine, EngineConfig
from serving.engine.metrics import EngineMetrics
from serving.engine.prefix import Prefixes
from serving.engine.requests import (
    CompressionRequest,
    Event,
    Finish,
    Request,
    SamplingParams,
    Stream,
    Token,
)
from serving.engine.runner import open_runner
from serving.engine.steps import StepServer
from serving.prefix_cache.planner import ReplayMode, ReplayRequest
from serving.prefix_cache.rpc import Call, RemoteIndex, Reply
from serving.replay.cost import measure_cost

LOAD_SECONDS = 0.5
_CODES: dict[type[Exception], str] = {
    OverloadedError: "UNAVAILABLE",
    CancelledError: "CANCELLED",
    RequestError: "INVALID_ARG",
}
Events = queue.SimpleQueue["tuple[Outbox, tuple[Event, ...]] | None"]


@dataclasses.dataclass(eq=False)
class Outbox(Stream):
    """A stream whose events go to the pump with the response sender they belong to."""

    sender: Any = None
    pump: "Events" = dataclasses.field(default_factory=queue.SimpleQueue)
    name: str = ""
    complete: bool = False  # the caller has the answer: being called off is no failure
    submitted: float = dataclasses.field(default_factory=time.monotonic)

    def put(self, *events: Event) -> None:
        self.pump.put((self, events))


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        bundle = Bundle.open(bundle_path(__file__))
        config = from_parameters(EngineConfig, args)
        model = open_runner(bundle, config.threads)
        prefixes = Prefixes(bundle, RemoteIndex(send), measure_cost(model))
        self.engine = Engine(model, config, prefixes)
        self.steps = StepServer(model, self.engine.max_seq_len) if config.calibration else None
        self.metrics = EngineMetrics(edge.Metrics())
        self.open: dict[str, Outbox] = {}
        self.events: Events = queue.SimpleQueue()
        self.pump = threading.Thread(target=self.run_pump, name="pump", daemon=True)
        self.pump.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                self.admit(request, sender)
            except Exception as e:
                self.refuse(sender, e)

    def admit(self, request: Any, sender: Any) -> None:
        args = json.loads(edge.text(request, "args") or "{}")
        op = edge.text(request, "op")
        if op == "step":
            self.step(request, sender, args)
            return
        if op:
            for name in args["ids"]:
                if stream := self.open.get(name):
                    stream.complete |= op == "stop"
                    stream.cancel()
            sender.send(flags=edge.FINAL)
            return
        tokens = edge.array(request, "tokens")
        if tokens is None:
            raise RequestError("tokens is missing")
        wanted = Request(
            tokens.astype(np.int32),
            SamplingParams(**{**args["sampling"], **_tuples(args["sampling"])}),
            ReplayRequest(ReplayMode(args["replay"][0]), args["replay"][1]),
            CompressionRequest(**args.get("compression", {})),
            args["cache_salt"],
        )
        stream = Outbox(wanted, sender=sender, pump=self.events, name=args["id"])
        self.open[stream.name] = stream
        # A thread of the server, one of few, is held until the first response: send one at once.
        stream.put()
        try:
            self.engine.submit(wanted, stream)
        except HybridServeError as e:
            stream.put(e)
        except Exception as e:  # not to the caller of this: the stream has its first response
            stream.put(HybridServeError(f"{type(e).__name__}: {e}"))

    def step(self, request: Any, sender: Any, args: dict[str, Any]) -> None:
        """One step of a calibration that runs elsewhere; requests wait meanwhile."""
        if self.steps is None:
            raise RequestError(
                "calibration is off on this server",
                fix="Set the parameter calibration of the engine model to true",
            )
        tokens, states = (edge.array(request, n) for n in ("tokens", "states"))
        if tokens is None or states is None:
            raise RequestError("tokens and states are needed")
        logits, after, sums = self.steps.run(args, tokens, states)
        outputs = [edge.tensor("logits", "FP32", logits), edge.tensor("states", "FP32", after)]
        outputs.append(_result({"decay_sums": sums}))
        sender.send(edge.response(outputs), flags=edge.FINAL)

    def refuse(self, sender: Any, error: Exception) -> None:
        self.metrics.outcome("refused")
        sender.send(edge.response([_result(_error(error))]), flags=edge.FINAL)

    def run_pump(self) -> None:
        """Send events; what has queued up for one stream leaves as one response."""
        running, next_look = True, 0.0
        while running:
            grouped: dict[Outbox, list[Event]] = {}
            with contextlib.suppress(queue.Empty):
                item = self.events.get(timeout=LOAD_SECONDS)
                while item is not None:
                    grouped.setdefault(item[0], []).extend(item[1])
                    item = self.events.get_nowait()
                running = False
            for stream, together in grouped.items():
                try:
                    self.send(stream, together)
                except Exception as e:
                    stream.cancel()
                    edge.internal_error(e)
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + LOAD_SECONDS
                self.metrics.load(self.engine.load())

    def send(self, stream: Outbox, events: list[Event]) -> None:
        tokens = [e for e in events if isinstance(e, Token)]
        outputs = []
        if tokens:
            outputs.append(edge.tensor("token_ids", "INT64", [t.token_id for t in tokens]))
            if stream.request.sampling.log_probs:
                outputs.append(edge.tensor("log_probs", "FP32", [t.log_prob for t in tokens]))
        last = events[-1] if events else None
        if last is None or isinstance(last, Token):
            stream.sender.send(edge.response(outputs))
            return
        self.open.pop(stream.name, None)
        if isinstance(last, Finish):
            result = {"reason": last.reason, **last.usage.to_dict()}
        else:
            result = _error(last)
        stream.sender.send(edge.response([*outputs, _result(result)]), flags=edge.FINAL)
        self.count(stream, last)

    def count(self, stream: Outbox, last: Finish | HybridServeError) -> None:
        if not isinstance(last, Finish):
            refused = isinstance(last, RequestError | OverloadedError)
            self.metrics.outcome("refused" if refused else "error")
        elif last.reason == "cancelled" and not stream.complete:
            self.metrics.outcome("cancelled")
        else:
            self.metrics.outcome("ok")
            self.metrics.finished(last.usage, time.monotonic() - stream.submitted)

    def finalize(self) -> None:
        self.engine.close()
        self.events.put(None)
        self.pump.join(timeout=5)


def send(call: Call) -> Reply:
    """One call to the prefix_cache model."""
    inputs = [edge.tensor("call", "STRING", call.text)]
    if len(call.tokens):
        inputs.append(edge.tensor("tokens", "INT64", call.tokens))
    response = edge.infer("prefix_cache", inputs, ["reply", "blocks", "generations"])
    if response.has_error():
        raise RuntimeError(response.error().message())
    blocks, generations = (edge.array(response, n) for n in ("blocks", "generations"))
    assert blocks is not None
    assert generations is not None
    return Reply(edge.text(response, "reply") or "", blocks, generations)


def _tuples(sampling: dict[str, Any]) -> dict[str, Any]:
    return {
        "stop_tokens": tuple(sampling["stop_tokens"]),
        "bad_tokens": tuple(tuple(b) for b in sampling["bad_tokens"]),
    }


def _result(result: dict[str, Any]) -> Any:
    return edge.tensor("result", "STRING", json.dumps(result))


def _error(error: Exception) -> dict[str, str]:
    for kind, code in _CODES.items():
        if isinstance(error, kind):
            return {"error": str(error), "code": code}
    return {"error": edge.internal_error(error), "code": "INTERNAL"}
