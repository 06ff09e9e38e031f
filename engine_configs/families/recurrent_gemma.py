"""RecurrentGemma (Griffin): RG-LRU blocks, every third layer attention over a window."""

from __future__ import annotations

import numpy as np

from engine_configs.errors import ConfigError
from engine_configs.families.config import ConfigReader
from engine_configs.families.stack import ATTENTION, MLP, Stack
from engine_configs.families.weights import Family, Source, Sources
from engine_configs.spec import Attention, Block, Mlp, Norm, RgLru

_RECURRENT = {
    "x_proj": "linear_x.weight",
    "x_proj_bias": "linear_x.bias",
    "y_proj": "linear_y.weight",
    "y_proj_bias": "linear_y.bias",
    "o_proj": "linear_out.weight",
    "o_proj_bias": "linear_out.bias",
    "conv_bias": "conv_1d.bias",
    "rate": "rg_lru.recurrent_param",
    "input_gate": "rg_lru.input_gate_weight",
    "recurrent_gate": "rg_lru.recurrent_gate_weight",
}


def recurrent_gemma(config: ConfigReader) -> Family:
    """transformers/models/recurrent_gemma."""
    hidden = config.positive("hidden_size")
    heads = config.positive("num_attention_heads")
    head_dim = config.positive("head_dim", hidden // heads)
    norm = Norm(config.take("rms_norm_eps", float, 1e-6), offset=1.0)
    config.expect("hidden_activation", "gelu_pytorch_tanh")
    config.expect("attention_bias", False)
    config.ignore("w_init_variance_scale", "final_w_init_variance_scale", "layers_block_type")
    config.ignore("layer_types")  # follow from block_types
    share = config.take("partial_rotary_factor", float, 0.5)
    attention = Attention(
        num_heads=heads,
        num_kv_heads=config.positive("num_key_value_heads", heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=config.rope(head_dim, default_theta=10_000.0, rotary_share=share),
        window=config.first("attention_window_size", "sliding_window", kind=int, default=2048),
        out_bias=True,
    )
    width = config.positive("lru_width", hidden)
    recurrent = RgLru(width, heads, config.positive("conv1d_width", 4))
    mlp = Mlp(config.positive("intermediate_size") // 2, "gelu_tanh", bias=True)
    kinds = config.take("block_types", list, ["recurrent", "recurrent", "attention"])

    stack = Stack("model", norm="final_norm")
    for i in range(config.positive("num_hidden_layers")):
        kind = kinds[i % len(kinds)]
        if kind == "attention":
            stack.layer(Block("attn", attention, norm), Block("mlp", mlp, norm))
            stack.take("attn", "temporal_block", ATTENTION | {"o_proj_bias": "o_proj.bias"})
        elif kind == "recurrent":
            stack.layer(Block("linear", recurrent, norm), Block("mlp", mlp, norm))
            stack.take("linear", "temporal_block", _RECURRENT)
            stack.conv("linear.conv", "temporal_block.conv_1d")
            for gate in ("input", "recurrent"):
                path = stack.paths(f"temporal_block.rg_lru.{gate}_gate_bias")[0]
                stack.put(f"linear.{gate}_gate_bias", _by_block(path, heads))
        else:
            raise ConfigError(f"block_types holds {kind!r}", where=config.where)
        stack.take(stack.layers[-1][0].name, "", {"pre_norm": "temporal_pre_norm.weight"})
        stack.take("mlp", "", {"pre_norm": "channel_pre_norm.weight"})
        biases = {f"{name}_bias": f"{name}.bias" for name in MLP}
        stack.take("mlp", "mlp_block", MLP | biases)
    return stack.family(
        config,
        "recurrent_gemma",
        hidden,
        norm,
        max_position=config.positive("max_position_embeddings", 8192),
        tied=True,
        embedding_scale=_to_bf16(hidden**0.5),
        logit_softcap=config.take("logits_soft_cap", float, 30.0),
    )


def _by_block(name: str, blocks: int) -> Sources:
    """A vector kept as [blocks, size]."""
    return (Source((name,), lambda b: b.reshape(-1), lambda s: (blocks, s[0] // blocks)),)


def _to_bf16(value: float) -> float:
    """As the modeling code rounds the embedding's scale, to nearest, ties to even."""
    bits = int(np.float32(value).view(np.uint32))
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(np.uint32(rounded).view(np.float32))
