"""A stand-in for the parts of TensorRT-LLM that hybrid_trtllm touches, on a CPU.

Signatures are those recorded from TensorRT-LLM's sources (see package/symbols.py); behaviour is the
least that the cache managers rely on: pages, a prefix tree with partial blocks, the request's
cursor. Pages that were published for reuse must never change: `Pages.check` sees to it.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

PAGES = 64


@dataclass
class Request:
    """``LlmRequest``: the cursor behaves as the C++ one does."""

    py_request_id: int
    tokens: list[int]
    prompt_len: int
    new_tokens: int = 1
    cache_salt: str | None = None
    lora_task_id: int | None = None
    is_dummy_request: bool = False
    context_current_position: int = 0
    prepopulated_prompt_len: int = 0
    _chunk: int = 0
    logits: list[Any] = field(default_factory=list)

    def get_tokens(self, beam: int) -> list[int]:
        return list(self.tokens)

    @property
    def is_first_context_chunk(self) -> bool:
        return self.context_current_position == self.prepopulated_prompt_len

    @property
    def context_remaining_length(self) -> int:
        return self.prompt_len - self.context_current_position

    @property
    def context_chunk_size(self) -> int:
        return self._chunk

    @context_chunk_size.setter
    def context_chunk_size(self, size: int) -> None:
        self._chunk = min(size, self.context_remaining_length)

    def set_prepopulated_prompt_len(self, size: int, tokens_per_block: int) -> None:
        """Only moves forward."""
        self.prepopulated_prompt_len = max(self.prepopulated_prompt_len, size)
        self.context_current_position = max(self.context_current_position, size)

    def move(self) -> None:
        self.context_current_position += self._chunk
        self._chunk = 0


class Pages:
    """Pages of some layers, and which tokens the published ones hold."""

    def __init__(self, layers: list[int], shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        """``shape``: tokens of a page, K/V heads, head_dim."""
        self.page = shape[0]
        self.buffers = {i: torch.zeros(PAGES, 2, *shape, dtype=dtype) for i in layers}
        self.free = list(range(PAGES))[::-1]
        self.tables: dict[int, list[int]] = {}
        # Tokens before a block → pages that continue them, with their tokens.
        self.tree: dict[tuple[int, ...], dict[tuple[int, ...], int]] = {}
        self.frozen: dict[int, dict[int, torch.Tensor]] = {}

    def open(self, request: int, tokens: list[int], room: int) -> int:
        """A table for ``room`` tokens; returns how many of ``tokens`` are cached in it."""
        table, hit = self.tables.setdefault(request, []), 0
        while hit < len(tokens):
            wanted = tuple(tokens[hit : hit + self.page])
            known = self.tree.get(tuple(tokens[:hit]), {})
            best = max(known, key=lambda block: _shared(block, wanted), default=())
            shared = _shared(best, wanted)
            if shared == self.page:
                table.append(known[best])
            elif shared:  # a block that is used in part is copied
                table.append(self.free.pop())
                for buffer in self.buffers.values():
                    buffer[table[-1]] = buffer[known[best]]
            hit += shared
            if shared < self.page:
                break
        self.grow(request, room)
        return hit

    def grow(self, request: int, room: int) -> None:
        table = self.tables[request]
        while len(table) * self.page < room:
            table.append(self.free.pop())

    def publish(self, request: int, tokens: list[int]) -> None:
        for start in range(0, len(tokens), self.page):
            block = tuple(tokens[start : start + self.page])
            page = self.tables[request][start // self.page]
            known = self.tree.setdefault(tuple(tokens[:start]), {})
            if block not in known and page not in self.frozen:
                known[block] = page
                rows = slice(len(block))
                self.frozen[page] = {i: b[page, :, rows].clone() for i, b in self.buffers.items()}

    def close(self, request: int) -> None:
        for page in self.tables.pop(request):
            if page not in self.frozen and all(page not in t for t in self.tables.values()):
                self.free.append(page)

    def check(self) -> None:
        """Raises AssertionError where a published page was written to."""
        for page, layers in self.frozen.items():
            for i, rows in layers.items():
                assert torch.equal(self.buffers[i][page, :, : rows.shape[1]], rows), page


def _shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
                min(len(a), len(b)))  # fmt: skip


class _Manager:
    def _setup(self, shape: tuple[int, int, int], dtype: torch.dtype, mask: list[bool]) -> None:
        self.tokens_per_block = shape[0]
        self.pages = Pages([i for i, m in enumerate(mask) if m], shape, dtype)

    def _dummies(self, ids: list[int], lengths: list[int] | None) -> list[Request]:
        made = []
        for i, request in enumerate(ids):
            n = lengths[i] if lengths else 1
            self.pages.open(request, [], n)
            made.append(Request(request, [1] * n, n, is_dummy_request=True))
        return made


class KVCacheManager(_Manager):
    """Line 1.2."""

    def __init__(
        self, kv_cache_config, kv_cache_type, *, num_layers, num_kv_heads, head_dim,
        tokens_per_block, max_seq_len, max_batch_size, mapping, dtype=None, spec_config=None,
        layer_mask=None, max_num_tokens=8192, model_config=None, max_beam_width=1, is_draft=False,
        kv_connector_manager=None, **kwargs,
    ):  # fmt: skip
        assert num_layers == sum(layer_mask)
        self._setup((tokens_per_block, num_kv_heads, head_dim), dtype, layer_mask)
        self.impl = SimpleNamespace(remove_sequence=self._remove)

    def _remove(self, request_id, request, pin):
        if request is not None and not request.is_dummy_request:
            self.pages.publish(request_id, request.get_tokens(0)[:-1])
        self.pages.close(request_id)

    def prepare_resources(self, scheduled_batch):
        for request in scheduled_batch.context_requests:
            if request.is_first_context_chunk:
                assert request.py_request_id not in self.pages.tables, "added twice"
                tokens = request.tokens[: request.prompt_len - 1]
                hit = self.pages.open(request.py_request_id, tokens, request.prompt_len)
                request.set_prepopulated_prompt_len(hit, self.tokens_per_block)
                request.context_chunk_size = request.context_chunk_size
        for request in scheduled_batch.generation_requests:
            self.pages.grow(request.py_request_id, len(request.tokens))

    def update_resources(self, scheduled_batch, attn_metadata=None, kv_cache_dtype_byte_size=None):
        for request in scheduled_batch.context_requests:
            if request.context_remaining_length == 0:
                tokens = request.tokens[: request.prompt_len]
                self.pages.publish(request.py_request_id, tokens)

    def free_resources(self, request, pin_on_release=False):
        return self.impl.remove_sequence(request.py_request_id, request, pin_on_release)

    def add_dummy_requests(self, request_ids, token_nums=None, is_gen=False):
        return self._dummies(request_ids, token_nums)

    @staticmethod
    def get_cache_size_per_token(model_config, mapping, **kwargs):
        raise AssertionError("asks for layers that keep no K/V")

    def get_batch_cache_indices(self, request_ids, window_size=None):
        return [list(self.pages.tables[r]) for r in request_ids]

    def get_buffers(self, layer_idx):
        return self.pages.buffers[layer_idx]


class KVCacheManagerV2(_Manager):
    """Line 1.4."""

    def __init__(
        self, kv_cache_config, kv_cache_type, *, num_layers, num_kv_heads, head_dim,
        tokens_per_block, max_seq_len, max_batch_size, mapping, dtype=None, spec_config=None,
        layer_mask=None, vocab_size=None, max_num_tokens=8192, **kwargs,
    ):  # fmt: skip
        assert num_layers == sum(layer_mask)
        self._setup((tokens_per_block, num_kv_heads, head_dim), dtype, layer_mask)
        self.hits: dict[int, int] = {}

    def prepare_context(self, req):
        if req.is_first_context_chunk:
            if req.py_request_id not in self.pages.tables:
                tokens = req.tokens[: req.prompt_len - 1]
                hit = self.pages.open(req.py_request_id, tokens, req.prompt_len)
                self.hits[req.py_request_id] = hit
            req.set_prepopulated_prompt_len(self.hits[req.py_request_id], self.tokens_per_block)
        return True

    def prepare_resources(self, scheduled_batch):
        for request in scheduled_batch.generation_requests:
            self.pages.grow(request.py_request_id, len(request.tokens))

    def update_resources(self, scheduled_batch, attn_metadata=None, kv_cache_dtype_byte_size=None):
        for request in scheduled_batch.context_requests:
            self.try_commit_blocks(request)

    def try_commit_blocks(self, request):
        """Whole blocks; what is left of the last one at the end of the prompt."""
        end = request.context_current_position
        if request.context_remaining_length:
            end -= end % self.tokens_per_block
        self.pages.publish(request.py_request_id, request.tokens[:end])

    def free_resources(self, request, pin_on_release=False):
        self.pages.close(request.py_request_id)

    def add_dummy_requests(self, request_ids, token_nums=None, is_gen=False):
        return self._dummies(request_ids, token_nums)

    @classmethod
    def get_cache_size_per_token(
        cls, model_config, mapping, num_layers=None, *, tokens_per_block, max_batch_size=0, **kwargs
    ):
        raise AssertionError("asks for layers that keep no K/V")

    def get_batch_cache_indices(self, request_ids, layer_idx=None, num_blocks_per_seq=None):
        return [list(self.pages.tables[r]) for r in request_ids]

    def get_buffers(self, layer_idx, kv_layout="NHD"):
        return self.pages.buffers[layer_idx]


class Mamba2Metadata:
    def __init__(self) -> None:
        self.has_initial_states = torch.zeros(8, dtype=torch.bool)
        self.use_initial_states = False

    def prepare(self, attn_metadata):
        cached = attn_metadata.kv_cache_params.num_cached_tokens_per_seq
        for i in range(attn_metadata.num_contexts):
            self.has_initial_states[i] = cached[i] > 0
        self.use_initial_states = any(n > 0 for n in cached[: attn_metadata.num_contexts])


class DecoderModel(torch.nn.Module):
    def __init__(self, model_config):
        super().__init__()
        self.model_config = model_config


class DecoderModelForCausalLM(torch.nn.Module):
    def __init__(self, model, *, config, hidden_size, vocab_size):
        super().__init__()
        self.model, self.model_config = model, config
        dtype = config.pretrained_config.torch_dtype
        self.lm_head = torch.nn.Linear(hidden_size, vocab_size, bias=False, dtype=dtype)

    @torch.no_grad()
    def forward(self, attn_metadata, input_ids=None, position_ids=None, **kwargs):
        hidden = self.model(attn_metadata, input_ids, position_ids)
        last = attn_metadata.seq_lens.cumsum(0) - 1
        return self.lm_head(hidden[last]).float()


def register_auto_model(name):
    def decorator(cls):
        sys.modules["tensorrt_llm._torch.models.modeling_utils"].MODELS[name] = cls
        return cls

    return decorator


def get_kv_cache_manager_cls_v1(model_config):
    return KVCacheManager


def get_kv_cache_manager_cls_v2(
    model_config, kv_cache_config, is_disagg=False, cache_transceiver_config=None
):
    return KVCacheManagerV2


Held = dict[str, dict[str, Any]]


def modules(line: str) -> Held:
    """What each module of the fake holds, by name."""
    root = "tensorrt_llm._torch"
    metadata = type("Mamba2Metadata", (Mamba2Metadata,), {"prepare": Mamba2Metadata.prepare})
    found = {
        "tensorrt_llm": {"__version__": {"1.2": "1.2.1", "1.4": "1.4.0rc1"}[line]},
        f"{root}.modules.mamba.mamba2_metadata": {"Mamba2Metadata": metadata},
        f"{root}.models.modeling_utils": {
            "DecoderModel": DecoderModel, "register_auto_model": register_auto_model,
            "DecoderModelForCausalLM": DecoderModelForCausalLM, "MODELS": {},
        },
    }  # fmt: skip
    if line == "1.2":
        choose: Callable[..., type] = get_kv_cache_manager_cls_v1
        found[f"{root}.pyexecutor.resource_manager"] = {"KVCacheManager": KVCacheManager}
    else:
        choose = get_kv_cache_manager_cls_v2
        name = f"{root}.pyexecutor.kv_cache.kv_cache_manager_v2"
        found[name] = {"KVCacheManagerV2": KVCacheManagerV2}
    found[f"{root}.pyexecutor._util"] = {"get_kv_cache_manager_cls": choose}
    return found


def install_fake(
    line: str, change: Callable[[dict[str, dict[str, Any]]], None] | None = None
) -> None:
    """Put the fake into sys.modules; ``change`` may alter what its modules hold first."""
    held = modules(line)
    if change:
        change(held)
    for name in list(held):
        parts = name.split(".")
        for end in range(1, len(parts)):
            held.setdefault(".".join(parts[:end]), {})
    for name, values in held.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(values)
        sys.modules[name] = module


def remove_fake() -> None:
    """Also forget what was imported against it."""
    for name in list(sys.modules):
        if name.partition(".")[0] == "tensorrt_llm" or name.endswith(".package.engine"):
            del sys.modules[name]
