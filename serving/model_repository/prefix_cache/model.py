"""The prefix-cache manager as a Triton model: one instance, metadata only.

Bulk data moves through the arena, a memory-mapped file that the engine opens by the path every
reply names.
"""

import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

# The bundle's own copy of the code, whatever else is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "python"))

import numpy as np

from serving import triton_edge as edge
from serving.deploy import arena_name, bundle_path, from_parameters
from serving.engine.bundle import Bundle
from serving.engine.prefix import make_cache
from serving.prefix_cache import CacheConfig
from serving.prefix_cache.metrics import CacheMetrics
from serving.prefix_cache.rpc import Call, handle

METRICS_SECONDS = 0.5


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = replace(from_parameters(CacheConfig, args), name=arena_name())
        self.cache = make_cache(Bundle.open(bundle_path(__file__)), config)
        self.metrics = CacheMetrics(edge.Metrics())
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        self.housekeeper = threading.Thread(target=self.keep_house, daemon=True)
        self.housekeeper.start()

    def execute(self, requests: list[Any]) -> list[Any]:
        responses = []
        for request in requests:
            try:
                responses.append(self.answer(request))
            except Exception as e:
                responses.append(edge.error_response("INTERNAL", edge.internal_error(e)))
        return responses

    def answer(self, request: Any) -> Any:
        tokens = edge.array(request, "tokens")
        tokens = np.zeros(0, np.int32) if tokens is None else tokens.astype(np.int32)
        with self.lock:
            reply = handle(self.cache, Call(edge.text(request, "call") or "{}", tokens))
        outputs = [edge.tensor("reply", "STRING", reply.text)]
        outputs.append(edge.tensor("blocks", "INT64", reply.blocks))
        outputs.append(edge.tensor("generations", "UINT64", reply.generations))
        return edge.response(outputs)

    def keep_house(self) -> None:
        """Expire the leases of dead clients; publish the counters."""
        while not self.stopping.wait(METRICS_SECONDS):
            try:
                with self.lock:
                    self.cache.expire()
                    stats = self.cache.stats()
                self.metrics.update(stats)
            except Exception as e:
                edge.internal_error(e)

    def finalize(self) -> None:
        self.stopping.set()
        self.housekeeper.join(timeout=5)
        self.cache.arena.unlink()
