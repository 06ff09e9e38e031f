"""Tiny random models, at least one of each family, and how they are made to remember.

The vocabulary differs from the width of every projection, so that no test can pass by a matrix
taken for another of the same shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

VOCAB = 331
FULL, LINEAR = "full_attention", "linear_attention"


@dataclass(frozen=True)
class Case:
    """``config`` builds the transformers config; ``limit``: max abs logit error allowed in fp32."""

    family: str
    config: Callable[[], Any]
    limit: float = 2e-4
    auto_class: str = "AutoModelForCausalLM"
    # Rewrites the saved config.json, for spellings that only released checkpoints have.
    respell: Callable[[dict[str, Any]], dict[str, Any]] | None = None


def _config(name: str, **values: Any) -> Callable[[], Any]:
    common = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return lambda: getattr(transformers, name)(**{**common, **values})


def _vision_language(name: str, **text: Any) -> Callable[[], Any]:
    """A Qwen3.5 that can also see; only its text model is ours."""
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 40}
    values = _config(f"{name}TextConfig", **text)().to_dict()
    config = getattr(transformers, f"{name}Config")
    return lambda: config(text_config=values, vision_config={**vision, "out_hidden_size": 64})


_GDN = {
    "num_hidden_layers": 4,
    "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_QWEN = {**_GDN, "head_dim": 32, "rope_parameters": {
    "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}}  # fmt: skip
_QWEN_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 48,
}

_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 24, "mamba_n_groups": 2}
_GRANITE = {
    **_MAMBA,
    "num_hidden_layers": 4,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
    "shared_intermediate_size": 48,
    "embedding_multiplier": 3.0,
    "logits_scaling": 1.5,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.2,
}
_FALCON = {
    **_MAMBA,
    "num_hidden_layers": 3,
    "head_dim": 24,
    "mamba_d_ssm": 128,
    "embedding_multiplier": 2.5,
    "lm_head_multiplier": 0.7,
    "mlp_multipliers": [0.8, 1.2],
    "key_multiplier": 1.3,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 1.1,
    "ssm_in_multiplier": 1.15,
    "ssm_out_multiplier": 0.85,
    "ssm_multipliers": [0.7, 0.8, 1.3, 1.2, 0.9],
}
_NEMOTRON = {
    "layers_block_type": [LINEAR, "mlp", LINEAR, FULL, "mlp", LINEAR, "moe"],
    "head_dim": 24,
    "ssm_state_size": 24,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 1.5,
    "n_group": 3,
    "topk_group": 2,
}
_LFM2 = {
    "num_hidden_layers": 6,
    "layer_types": ["conv", "conv", FULL, "conv", FULL, "conv"],
    "block_multiple_of": 8,
}
_MINIMAX = {
    "num_hidden_layers": 4,
    "layer_types": [FULL, LINEAR, LINEAR, FULL],
    "head_dim": 24,
    "num_local_experts": 5,
    "block_size": 32,
    "full_attn_alpha_factor": 1.2,
    "full_attn_beta_factor": 0.8,
    "linear_attn_alpha_factor": 1.3,
    "linear_attn_beta_factor": 0.7,
    "mlp_alpha_factor": 1.1,
    "mlp_beta_factor": 0.9,
}
_KIMI = {
    "num_hidden_layers": 5,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR, FULL],
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "linear_head_dim": 16,
    "linear_num_heads": 3,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "n_group": 2,
    "num_key_value_heads": 4,
}
_JAMBA = {
    "num_hidden_layers": 4,
    "attn_layer_period": 4,
    "attn_layer_offset": 2,
    "num_experts": 5,
    "mamba_d_state": 6,
    "mamba_dt_rank": 12,
}
_GRIFFIN = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "lru_width": 56,
    "attention_window_size": 40,
    "block_types": ["recurrent", "attention", "recurrent"],
}
_ZAMBA2 = {
    "num_hidden_layers": 6,
    "layers_block_type": [LINEAR, "hybrid", LINEAR, "hybrid", "hybrid", LINEAR],
    "num_key_value_heads": 4,
    "mamba_d_state": 24,
    "n_mamba_heads": 8,
    "mamba_ngroups": 2,
    "num_mem_blocks": 2,
    "adapter_rank": 6,
}


def _moonshot_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of the released Kimi Linear config; its layers are numbered from 1."""
    numbered = list(enumerate(config.pop("layer_types"), start=1))
    config.pop("mlp_layer_types")
    config["linear_attn_config"] = {
        "full_attn_layers": [i for i, kind in numbered if kind == FULL],
        "kda_layers": [i for i, kind in numbered if kind == LINEAR],
        "head_dim": config.pop("linear_head_dim"),
        "num_heads": config.pop("linear_num_heads"),
        "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
    }
    return config


def _nvidia_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of the released Nemotron-H configs."""
    letters = {LINEAR: "M", FULL: "*", "mlp": "-", "moe": "E"}
    types = config.pop("layers_block_type")
    config["attention_head_dim"] = config.pop("head_dim")
    config["hybrid_override_pattern"] = "".join(letters[t] for t in types)
    return config


CASES: dict[str, Case] = {
    "olmo_hybrid_nope": Case(
        "olmo_hybrid",
        _config(
            "OlmoHybridConfig",
            **_GDN,
            rope_parameters={"rope_type": "default", "rope_theta": None},
        ),
    ),
    "olmo_hybrid_rope": Case(
        "olmo_hybrid",
        _config(
            "OlmoHybridConfig",
            **_GDN,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
    ),
    "qwen3_5_text": Case("qwen3_5_text", _config("Qwen3_5TextConfig", **_QWEN)),
    "qwen3_next": Case(
        "qwen3_next", _config("Qwen3NextConfig", **_QWEN, **_QWEN_MOE, mlp_only_layers=[1])
    ),
    "qwen3_5_moe_text": Case(
        "qwen3_5_moe_text", _config("Qwen3_5MoeTextConfig", **_QWEN, **_QWEN_MOE)
    ),
    "qwen3_5": Case(
        "qwen3_5",
        _vision_language("Qwen3_5", **_QWEN),
        auto_class="AutoModelForImageTextToText",
    ),
    "qwen3_5_moe": Case(
        "qwen3_5_moe",
        _vision_language("Qwen3_5Moe", **_QWEN, **_QWEN_MOE),
        auto_class="AutoModelForImageTextToText",
    ),
    "granite_moe_nope": Case(
        "granitemoehybrid",
        _config("GraniteMoeHybridConfig", **_GRANITE, num_local_experts=5, num_experts_per_tok=2),
    ),
    "granite_dense_rope": Case(
        "granitemoehybrid",
        _config(
            "GraniteMoeHybridConfig",
            **_GRANITE,
            num_local_experts=0,
            position_embedding_type="rope",
            tie_word_embeddings=True,
        ),
    ),
    "bamba": Case(
        "bamba", _config("BambaConfig", **_MAMBA, num_hidden_layers=4, attn_layer_indices=[1])
    ),
    "falcon_h1": Case("falcon_h1", _config("FalconH1Config", **_FALCON)),
    "falcon_h1_normed": Case(
        "falcon_h1", _config("FalconH1Config", **_FALCON, mamba_rms_norm=True)
    ),
    "nemotron_h": Case("nemotron_h", _config("NemotronHConfig", **_NEMOTRON)),
    "nemotron_h_nvidia": Case(
        "nemotron_h", _config("NemotronHConfig", **_NEMOTRON), respell=_nvidia_spelling
    ),
    "lfm2": Case("lfm2", _config("Lfm2Config", **_LFM2)),
    "minimax": Case("minimax", _config("MiniMaxConfig", **_MINIMAX)),
    "jamba": Case("jamba", _config("JambaConfig", **_JAMBA)),
    "recurrent_gemma": Case("recurrent_gemma", _config("RecurrentGemmaConfig", **_GRIFFIN)),
    "zamba2": Case("zamba2", _config("Zamba2Config", **_ZAMBA2)),
    "zamba2_adapted_rope": Case(
        "zamba2",
        _config("Zamba2Config", **_ZAMBA2, use_shared_attention_adapter=True, use_mem_rope=True),
    ),
    "kimi_linear": Case("kimi_linear", _config("KimiLinearConfig", **_KIMI)),
    "kimi_linear_moonshot": Case(
        "kimi_linear", _config("KimiLinearConfig", **_KIMI), respell=_moonshot_spelling
    ),
}


def build(case: Case, seed: int = 0) -> Any:
    """The model in fp32, every vector and the decays drawn anew."""
    torch.manual_seed(seed)
    model = getattr(transformers, case.auto_class).from_config(case.config()).float().eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            leaf = name.rsplit(".", 1)[-1]
            if leaf == "recurrent_param":  # RG-LRU: 8 softplus(p) times a gate around 1/2
                rates = torch.logspace(-4, -1, tensor.numel()) / 4
                tensor.copy_(rates.expm1().log())
            elif leaf == "A_log":  # -log decay of 1e-4 .. 1e-1 a token: 10 to 10,000 tokens
                rates = torch.logspace(-4, -1, tensor.numel())
                tensor.copy_(rates.log().reshape(tensor.shape))
            elif leaf == "dt_bias":
                tensor.fill_(0.5413)  # softplus(0.5413) = 1
            elif leaf == "e_score_correction_bias" or (
                tensor.ndim == 1 and isinstance(tensor, torch.nn.Parameter)
            ):
                tensor.add_(0.1 * torch.randn_like(tensor))
    return model
