"""A small executor over the fake of TensorRT-LLM: one batch a step, as PyExecutor runs it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from build.checkpoint import Checkpoint, Weights
from build.lab import Lab
from build.pipeline import Options, Silent, new_manifest, write_graph, write_manifest
from build.tensorrt_llm.package.install import install
from build.tensorrt_llm.package.settings import ARCHITECTURE, Settings
from engine_configs.families import read_checkpoint_config
from serving.engine.bundle import Bundle
from serving.engine.model import Model, decode_step
from serving.replay.calibration import Calibration, LayerUnits, Point
from tests.gpu.fake_trtllm import Request

PAGE, BATCH = 16, 4
TINY = Path(__file__).resolve().parents[2] / "engine_configs" / "hybrid-tiny"
Logits = NDArray[np.float32]


class Executor:
    """Requests run together, prompts in chunks of at most ``budget`` tokens."""

    def __init__(
        self,
        settings: Settings,
        weights: Any,
        budget: int = 64,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.line = install()
        from tensorrt_llm._torch.models import modeling_utils
        from tensorrt_llm._torch.pyexecutor import _util

        spec = settings.spec
        pretrained = SimpleNamespace(
            architectures=[ARCHITECTURE], torch_dtype=dtype, settings=settings
        )
        config = SimpleNamespace(
            pretrained_config=pretrained, mapping=SimpleNamespace(world_size=1)
        )
        self.model = modeling_utils.MODELS[ARCHITECTURE](config)
        self.model.load_weights({n: torch.from_numpy(weights.read(n)) for n in weights.shapes})
        arguments = (config,) if self.line == "1.2" else (config, None)
        self.manager = _util.get_kv_cache_manager_cls(*arguments)(
            None, None, num_layers=len(spec.layers), num_kv_heads=7, head_dim=9,
            tokens_per_block=PAGE, max_seq_len=1024, max_batch_size=BATCH, mapping=None,
            dtype=dtype,
        )  # fmt: skip
        self.budget, self.steps, self._next = budget, 0, 100
        self.ran: dict[int, int] = {}

    def generate(self, *prompts: list[int], new_tokens: int = 1, salt: str = "") -> list[Request]:
        """Greedy answers; each request's ``logits`` has a row per new token."""
        requests = []
        for prompt in prompts:
            self._next += 1
            requests.append(Request(self._next, list(prompt), len(prompt), new_tokens, salt))
        live = list(requests)
        while live:
            self.step(live)
            for request in [r for r in live if len(r.logits) == r.new_tokens]:
                self.manager.free_resources(request)
                live.remove(request)
            self.manager.pages.check()
        assert not self.manager.linear._live  # every row came back
        return requests

    def step(self, live: list[Request]) -> None:
        contexts = [r for r in live if r.context_remaining_length > 0]
        generations = [r for r in live if r.context_remaining_length == 0]
        for request in contexts:
            if self.line == "1.4":
                assert self.manager.prepare_context(request)
            request.context_chunk_size = self.budget
        batch = SimpleNamespace(
            context_requests=contexts,
            generation_requests=generations,
            all_requests=lambda: [*contexts, *generations],
        )
        self.manager.prepare_resources(batch)
        logits = self.forward(contexts, generations)
        for request in contexts:
            request.move()
        for row, request in zip(logits, [*contexts, *generations], strict=True):
            if request.context_remaining_length == 0:
                request.logits.append(row)
                request.tokens.append(int(row.argmax()))
        self.manager.update_resources(batch)
        self.steps += 1

    def forward(self, contexts: list[Request], generations: list[Request]) -> NDArray[np.float32]:
        """Logits of each request's last token of this step."""
        chunks = [
            (r.context_current_position, r.context_current_position + r.context_chunk_size)
            for r in contexts
        ] + [(len(r.tokens) - 1, len(r.tokens)) for r in generations]
        requests = [*contexts, *generations]
        tokens = [t for r, (a, b) in zip(requests, chunks, strict=True) for t in r.tokens[a:b]]
        for request, (a, b) in zip(requests, chunks, strict=True):
            self.ran[request.py_request_id] = self.ran.get(request.py_request_id, 0) + b - a
        metadata = SimpleNamespace(
            kv_cache_manager=self.manager,
            request_ids=[r.py_request_id for r in requests],
            num_contexts=len(contexts),
            seq_lens=torch.tensor([b - a for a, b in chunks]),
            kv_cache_params=SimpleNamespace(num_cached_tokens_per_seq=[a for a, _ in chunks]),
        )
        self.metadata = metadata
        return np.asarray(self.model(metadata, torch.tensor(tokens)).numpy())


class Tiny:
    """hybrid-tiny: its bundle in fp32, its weights, two prompts that share 137 tokens."""

    def __init__(self, folder: Path) -> None:
        self.family = read_checkpoint_config(TINY)
        self.spec = self.family.spec
        self.weights = Weights(self.family, Checkpoint(TINY))
        options = Options("tiny", self.family, TINY, folder)
        digest = write_graph(options, self.weights, folder, Silent())
        write_manifest(new_manifest(options, digest, folder), folder)
        self.model = Model(Bundle.open(folder), threads=1)
        ids = np.random.default_rng(7).integers(3, 250, 200)
        self.first, self.second = ids[:150], np.concatenate([ids[:137], ids[150:163]])

    def answer(self, prompt: NDArray[np.int64], count: int) -> tuple[list[int], Logits]:
        """Greedy tokens and logits of a cold run of the bundle."""
        lab = Lab(self.model, len(prompt) + count)
        rows = [lab.ask(prompt, np.array([len(prompt) - 1]))[0]]
        for position in range(len(prompt), len(prompt) + count - 1):
            step = decode_step([int(rows[-1].argmax())], [position])
            rows.append(self.model.run(lab.slots, 0, step)[0][0])
        return [int(r.argmax()) for r in rows], np.stack(rows)

    def calibration(self, **values: Any) -> Calibration:
        """Says that split replay costs 0.01 and a 5 % tail 0.02."""
        layers = tuple(
            LayerUnits(i, (0, 1), (1.0,) * m.units(), (0.1,) * m.units())
            for i, m in self.spec.state_layers()
        )
        known = Calibration(
            status="imported", interval=32, min_tail=8, dtype="fp32", layers=layers,
            curve=(Point(2, 8, 0.0, 1.0, 0.01), Point(0, 0, 0.05, 1.0, 0.02)), target_kl=0.1,
        )  # fmt: skip
        return replace(known, **values)
