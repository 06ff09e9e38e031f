"""A model that a server has loaded, step by step: what ``--calibrate-on`` runs on."""

from __future__ import annotations

import json
import queue
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from engine_configs.errors import ServerError
from engine_configs.spec import HybridSpec
from serving.engine.model import Step
from serving.engine.slots import SlotClass
from serving.engine.steps import Floats, pack_states, unpack_states

_OUTPUTS = [grpc.InferRequestedOutput(name) for name in ("logits", "states", "result")]


class RemoteModel:
    """The ``run`` of a model that a server at ``url`` (gRPC) has loaded.

    Raises ServerError with the server's message; its ``calibration`` parameter must be on.
    """

    def __init__(self, url: str, spec: HybridSpec, digest: str, timeout: float = 600.0) -> None:
        self.spec, self._digest, self._timeout = spec, digest, timeout
        self._url, self._client = url, grpc.InferenceServerClient(url)
        self._names: dict[int, str] = {}

    def run(
        self, slots: SlotClass, row: int, step: Step, *, decay_sums: bool = False
    ) -> tuple[Floats, dict[str, Floats]]:
        """As ``Model.run``; the states of ``slots`` change, its K/V arrays stay unused."""
        assert row == 0
        assert len(step.tokens) == 1
        name = self._names.setdefault(id(slots), uuid.uuid4().hex)
        args = {
            "model": self._digest,
            "slot": name,
            "capacity": slots.capacity,
            "start": int(step.positions[0, 0]),
            "total": int(step.total_lens[0]),
            "valid": None if step.valid_len is None else int(step.valid_len[0]),
            "append": step.append,
            "rows": step.logit_rows.tolist(),
            "decay_sums": decay_sums,
        }
        logits, states, result = self._call(args, step.tokens[0], pack_states(slots))
        unpack_states(states, slots)
        sums = {k: np.array([v], np.float32) for k, v in result["decay_sums"].items()}
        return logits.reshape(len(step.logit_rows), self.spec.vocab_size), sums

    def _call(
        self, args: Mapping[str, Any], tokens: NDArray[np.int64], states: Floats
    ) -> tuple[Floats, Floats, dict[str, Any]]:
        inputs = [
            _input("op", "BYTES", np.array([b"step"], object)),
            _input("args", "BYTES", np.array([json.dumps(args).encode()], object)),
            _input("tokens", "INT64", np.asarray(tokens, np.int64)),
            _input("states", "FP32", states),
        ]
        try:
            answer = self._answer(inputs)
        except InferenceServerException as e:
            raise ServerError(str(e.message()), where=self._url) from None
        result = json.loads(answer.as_numpy("result").reshape(-1)[0])
        if "error" in result:
            raise ServerError(result["error"], where=self._url)
        return answer.as_numpy("logits"), answer.as_numpy("states"), result

    def _answer(self, inputs: list[Any]) -> Any:
        """The one response of a decoupled model."""
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._client.start_stream(lambda result, error: answers.put(error or result))
        try:
            self._client.async_stream_infer("engine", inputs, outputs=_OUTPUTS)
            answer = answers.get(timeout=self._timeout)
        except queue.Empty:
            raise InferenceServerException(f"no answer in {self._timeout:.0f} s") from None
        finally:
            self._client.stop_stream()
        if isinstance(answer, InferenceServerException):
            raise answer
        return answer


def _input(name: str, kind: str, values: NDArray[Any]) -> Any:
    tensor = grpc.InferInput(name, list(values.shape), kind)
    tensor.set_data_from_numpy(values)
    return tensor
