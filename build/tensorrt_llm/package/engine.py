"""The model as TensorRT-LLM sees it. Only ``install`` imports this module: it needs TensorRT-LLM.

TensorRT-LLM schedules, owns the pages and samples; between, `HybridModel` runs on its batch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from tensorrt_llm._torch.models.modeling_utils import (  # type: ignore[import-not-found]
    DecoderModel,
    DecoderModelForCausalLM,
    register_auto_model,
)
from transformers import AutoConfig, PretrainedConfig

from engine_configs.errors import ConfigError

from .manager import ReplayManager, settings_of
from .model import HybridModel
from .retention import Retention
from .settings import ARCHITECTURE, MODEL_TYPE, Settings, read_settings


class HybridServeConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    """config.json; ``hybrid_serve`` in it is ours."""

    model_type = MODEL_TYPE

    def __init__(self, hybrid_serve: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.hybrid_serve = hybrid_serve
        super().__init__(**kwargs)

    @property
    def settings(self) -> Settings:
        """Raises ConfigError where config.json was not written by convert.py."""
        if self.hybrid_serve is None:
            raise ConfigError("key 'hybrid_serve' is missing", where="config.json")
        return read_settings(json.loads(json.dumps(self.hybrid_serve)), "config.json: hybrid_serve")


class HybridDecoder(DecoderModel):  # type: ignore[misc]
    """Hidden states of a batch."""

    def __init__(self, model_config: Any) -> None:
        super().__init__(model_config)
        mapping = model_config.mapping
        if mapping.world_size > 1:
            raise ConfigError(
                f"{mapping.world_size} GPUs, expected 1: weights and states are not split",
                where="hybrid_trtllm",
            )
        settings = settings_of(model_config)
        self.core = HybridModel(settings.spec, model_config.pretrained_config.torch_dtype)
        self._sparse = settings.sparse

    def forward(
        self,
        attn_metadata: Any,
        input_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Packed tokens [N] → hidden [N, H] in the weights' dtype."""
        manager = attn_metadata.kv_cache_manager
        if not isinstance(manager, ReplayManager) or input_ids is None:
            raise ConfigError(
                f"runs on {type(manager).__name__}, expected a ReplayManager and token ids",
                where="hybrid_trtllm",
                fix="Load the package with --custom_module_dirs",
            )
        count = attn_metadata.seq_lens.shape[0]
        cached = attn_metadata.kv_cache_params.num_cached_tokens_per_seq
        step = manager.step(
            list(attn_metadata.request_ids[:count]),
            [int(n) for n in attn_metadata.seq_lens],
            [int(n) for n in cached[:count]],
        )
        storage = manager.bind_pools()
        select = Retention(self._sparse, storage).select if self._sparse else None
        hidden, _ = self.core.hidden(input_ids, step, storage, select)
        return hidden.to(self.core.dtype)


@register_auto_model(ARCHITECTURE)
class HybridServeForCausalLM(DecoderModelForCausalLM):  # type: ignore[misc]
    """Logits for TensorRT-LLM's sampler."""

    def __init__(self, model_config: Any) -> None:
        spec = settings_of(model_config).spec
        super().__init__(
            HybridDecoder(model_config),
            config=model_config,
            hidden_size=spec.hidden_size,
            vocab_size=spec.vocab_size,
        )
        self._scale, self._cap = spec.logit_scale, spec.logit_softcap

    @classmethod
    def get_preferred_kv_cache_manager_version(cls, pretrained_config: Any = None) -> str:
        """What line 1.4 asks a model whose configuration leaves it open; line 1.2 has no choice."""
        return "V2"

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        logits: torch.Tensor = super().forward(*args, **kwargs) * self._scale
        return (logits / self._cap).tanh() * self._cap if self._cap else logits

    def load_weights(self, weights: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Canonical names, as convert.py wrote them."""
        read = {name: weights[name][:] for name in weights}
        self.model.core.load(read.items())
        spec = self.model.core.spec
        self.lm_head.weight.data.copy_(read["embed" if spec.tie_embeddings else "lm_head"])


def register_config() -> None:
    """Lets transformers read the tree's config.json."""
    AutoConfig.register(MODEL_TYPE, HybridServeConfig, exist_ok=True)
