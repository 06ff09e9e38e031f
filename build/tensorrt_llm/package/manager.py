"""Cache managers that keep the whole attention match of a prompt.

TensorRT-LLM's own hybrid managers either refuse block reuse (line 1.2) or cut a hit back to the
last snapshot of the recurrent states (line 1.4, MambaHybridCacheManagerV2). Here the K/V cache is
the attention-only manager, which knows of no recurrent state and so cuts nothing back, and the
states live beside it (states.py). What a request starts from decides where its first chunk starts:
before the end of the hit, whose K/V stays as it is.

Requests whose states or K/V are approximate leave nothing behind for others to reuse.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

from engine_configs.errors import UnsupportedModelError
from engine_configs.spec import HybridSpec

from .settings import Settings
from .states import LinearStates
from .step import Step, Storage, make_step


class ReplayManager:
    """What both lines share; mixed in before the attention-only manager. ``settings`` is set on
    the class, as TensorRT-LLM chooses a class and not an object."""

    settings: Settings

    def __init__(self, kv_cache_config: Any, kv_cache_type: Any, **kwargs: Any) -> None:
        spec = self.settings.spec
        super().__init__(  # type: ignore[call-arg]
            kv_cache_config, kv_cache_type, **attention_only(spec, kwargs)
        )
        device = "cuda" if torch.cuda.is_available() else "cpu"
        rows = kwargs["max_batch_size"] + self.settings.spare_rows
        self.storage = Storage.states(spec, rows, torch.float32, device)
        self.linear = LinearStates(
            spec,
            self.settings.calibration,
            self.storage,
            rows,
            self.settings.record_bytes,
            self.settings.replay,
        )

    def has_linear_state(self, request_id: int) -> bool:
        """For metadata.py: does the request's row hold anything but zeros?"""
        return not self.linear.of(request_id).fresh

    def step(self, request_ids: list[int], lengths: list[int], starts_at: list[int]) -> Step:
        """What the model runs on: ``lengths`` tokens of each request from ``starts_at`` on."""
        live = [self.linear.of(r) for r in request_ids]
        tables = self.block_tables(request_ids)
        return make_step(
            lengths,
            starts_at,
            [x.hit_len for x in live],
            tables,
            [x.slot for x in live],
            self.tokens_per_block,  # type: ignore[attr-defined]
            self.storage_device(),
        )

    def bind_pools(self) -> Storage:
        """The pools of every attention layer, as views of TensorRT-LLM's."""
        for i, _ in self.settings.spec.attention_layers():
            pool = self.get_buffers(i)  # type: ignore[attr-defined]
            self.storage.keys[i], self.storage.values[i] = pool[:, 0], pool[:, 1]
        return self.storage

    def storage_device(self) -> torch.device:
        states = [*self.storage.conv.values(), *self.storage.recurrent.values()]
        return states[0].device

    def block_tables(self, request_ids: list[int]) -> list[list[int]]:
        raise NotImplementedError

    def add_dummy_requests(self, request_ids: list[int], *args: Any, **kwargs: Any) -> Any:
        requests = super().add_dummy_requests(request_ids, *args, **kwargs)  # type: ignore[misc]
        for request in requests or ():
            if request.py_request_id not in self.linear:
                self.linear.begin_dummy(request.py_request_id)
        return requests

    def free_resources(self, request: Any, pin_on_release: bool = False) -> Any:
        dummy = getattr(request, "is_dummy_request", False)
        self.linear.end(request.py_request_id, () if dummy else request.get_tokens(0))
        return super().free_resources(request, pin_on_release)  # type: ignore[misc]

    def _begin(self, request: Any, hit_len: int) -> None:
        """Choose what the linear layers start from, and move the first chunk there."""
        tokens = request.get_tokens(0)[: request.prompt_len]
        plan = self.linear.begin(request.py_request_id, tokens, hit_len, scope_of(request))
        request.context_current_position = plan.start

    def _cut(self, request: Any, avoid: int = 0) -> None:
        """End the chunk where a checkpoint is due."""
        request.context_chunk_size = self.linear.chunk(
            request.py_request_id, request.context_chunk_size, request.prompt_len, avoid=avoid
        )

    def _advance(self, scheduled_batch: Any) -> None:
        """After a run; requests have moved on by then. The last sampled token was not fed."""
        for request in scheduled_batch.context_requests:
            position = request.context_current_position
            ends = request.context_remaining_length == 0
            self._to(request, position, ends)
        for request in scheduled_batch.generation_requests:
            self._to(request, len(request.get_tokens(0)) - 1, False)

    def _to(self, request: Any, position: int, ends: bool) -> None:
        if request.py_request_id in self.linear:
            tokens = request.get_tokens(0)
            self.linear.advance(request.py_request_id, tokens, position, ends=ends)

    def _exact(self, request: Any) -> bool:
        live = request.py_request_id in self.linear and self.linear.of(request.py_request_id)
        return bool(live) and live.exact  # type: ignore[union-attr]


class ReplayManagerV1(ReplayManager):
    """Over ``KVCacheManager`` (line 1.2): the match is known once ``prepare_resources`` ran."""

    def prepare_resources(self, scheduled_batch: Any) -> None:
        # Sizes that the scheduler has room for; the match then shortens them.
        new = [(r, r.context_chunk_size) for r in scheduled_batch.context_requests
               if r.py_request_id not in self.linear]  # fmt: skip
        super().prepare_resources(scheduled_batch)  # type: ignore[misc]
        for request, size in new:
            self._begin(request, request.prepopulated_prompt_len)
            request.context_chunk_size = size
        for request in scheduled_batch.context_requests:
            # A chunk that ended at the hit's end would be taken for a first one again.
            self._cut(request, avoid=request.prepopulated_prompt_len)

    def update_resources(
        self,
        scheduled_batch: Any,
        attn_metadata: Any = None,
        kv_cache_dtype_byte_size: float | None = None,
    ) -> None:
        self._advance(scheduled_batch)
        exact = [r for r in scheduled_batch.context_requests if self._exact(r)]
        stored = SimpleNamespace(
            context_requests=exact,
            generation_requests=scheduled_batch.generation_requests,
            all_requests=scheduled_batch.all_requests,
        )
        super().update_resources(  # type: ignore[misc]
            stored, attn_metadata, kv_cache_dtype_byte_size
        )

    def free_resources(self, request: Any, pin_on_release: bool = False) -> Any:
        exact = self._exact(request)
        if exact or getattr(request, "is_dummy_request", False):
            return super().free_resources(request, pin_on_release)
        self.linear.end(request.py_request_id)
        # Without the request, its blocks are freed and not stored for reuse.
        return self.impl.remove_sequence(  # type: ignore[attr-defined]
            request.py_request_id, None, pin_on_release
        )

    def block_tables(self, request_ids: list[int]) -> list[list[int]]:
        tables: list[list[int]] = self.get_batch_cache_indices(  # type: ignore[attr-defined]
            request_ids
        )
        return tables

    @staticmethod
    def get_cache_size_per_token(model_config: Any, mapping: Any, **kwargs: Any) -> int:
        return kv_bytes(settings_of(model_config).spec, model_config)


class ReplayManagerV2(ReplayManager):
    """Over ``KVCacheManagerV2`` (line 1.4): the scheduler asks ``prepare_context`` for the match
    and then sizes the chunk."""

    def prepare_context(self, req: Any) -> bool:
        ready: bool = super().prepare_context(req)  # type: ignore[misc]
        if ready and req.py_request_id not in self.linear:
            self._begin(req, req.context_current_position)
        elif ready:  # asked again before its first chunk ran: the cursor is back at the hit's end
            req.context_current_position = self.linear.of(req.py_request_id).position
        return ready

    def prepare_resources(self, scheduled_batch: Any) -> None:
        super().prepare_resources(scheduled_batch)  # type: ignore[misc]
        before = [r.context_chunk_size for r in scheduled_batch.context_requests]
        for request in scheduled_batch.context_requests:
            self._cut(request)
        cut = before != [r.context_chunk_size for r in scheduled_batch.context_requests]
        if cut and hasattr(scheduled_batch, "reset_context_requests"):
            scheduled_batch.reset_context_requests()  # which chunks are last ones has changed

    def update_resources(
        self,
        scheduled_batch: Any,
        attn_metadata: Any = None,
        kv_cache_dtype_byte_size: float | None = None,
    ) -> None:
        self._advance(scheduled_batch)
        super().update_resources(  # type: ignore[misc]
            scheduled_batch, attn_metadata, kv_cache_dtype_byte_size
        )

    def try_commit_blocks(self, request: Any, *rest: Any) -> None:
        if self._exact(request):
            super().try_commit_blocks(request, *rest)  # type: ignore[misc]

    def block_tables(self, request_ids: list[int]) -> list[list[int]]:
        layer = self.settings.spec.attention_layers()[0][0]
        tables: list[list[int]] = self.get_batch_cache_indices(  # type: ignore[attr-defined]
            request_ids, layer
        )
        return tables

    @classmethod
    def get_cache_size_per_token(
        cls, model_config: Any, mapping: Any, *args: Any, max_batch_size: int = 0, **kwargs: Any
    ) -> tuple[int, int]:
        """Bytes per token, and bytes that are there anyhow."""
        settings = settings_of(model_config)
        rows = max_batch_size + settings.spare_rows
        return kv_bytes(settings.spec, model_config), rows * settings.spec.state_bytes()


def attention_only(spec: HybridSpec, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the attention-only manager: pools for the layers that keep K/V.

    Raises UnsupportedModelError where they do not all have the same shape.
    """
    layers = spec.attention_layers()
    shapes = {(m.num_kv_heads, m.head_dim) for _, m in layers}
    if len(shapes) != 1:
        raise UnsupportedModelError(
            f"attention layers of {len(shapes)} shapes (K/V heads, head_dim): {sorted(shapes)}",
            where=spec.model_type,
        )
    ((heads, head_dim),) = shapes
    kept = {i for i, _ in layers}
    mask = [i in kept for i in range(len(spec.layers))]
    own = {"num_layers": len(layers), "num_kv_heads": heads, "head_dim": head_dim}
    return kwargs | own | {"layer_mask": mask}


def kv_bytes(spec: HybridSpec, model_config: Any) -> int:
    """Bytes of K/V a token takes in the pools: a V row is as wide as a K row there."""
    width = torch.empty(0, dtype=model_config.pretrained_config.torch_dtype).element_size()
    rows = sum(2 * m.num_kv_heads * m.head_dim for _, m in spec.attention_layers())
    return math.ceil(rows * width)


def settings_of(model_config: Any) -> Settings:
    """What convert.py wrote into config.json."""
    settings: Settings = model_config.pretrained_config.settings
    return settings


def scope_of(request: Any) -> bytes:
    """Who may share: TensorRT-LLM's own salt and adapter."""
    salt, adapter = (getattr(request, n, None) for n in ("cache_salt", "lora_task_id"))
    return repr((salt, adapter)).encode()
