"""Falcon-H1: attention and Mamba-2 side by side in every layer, then an MLP.

Its many multipliers scale linear maps, so they are folded into the weights on reading.
"""

from __future__ import annotations

import numpy as np

from engine_configs.families.config import ConfigReader
from engine_configs.families.mamba import read_mamba2, take_mamba2
from engine_configs.families.stack import ATTENTION, Stack
from engine_configs.families.weights import Array, Family, scaled
from engine_configs.spec import Attention, Block, Branch, Mamba2, Mlp, Norm


def falcon_h1(config: ConfigReader) -> Family:
    """transformers/models/falcon_h1."""
    hidden = config.positive("hidden_size")
    heads = config.positive("num_attention_heads")
    head_dim = config.positive("head_dim", hidden // heads)
    norm = Norm(config.take("rms_norm_eps", float, 1e-5))
    config.expect("hidden_act", "silu")
    for key in ("attention_bias", "mlp_bias", "projectors_bias"):
        config.expect(key, False)
    config.expect("attn_layer_indices", None)
    config.ignore(*(k for k in config.data if k.startswith("time_step_") and k[10:] != "limit"))
    config.ignore("num_logits_to_keep", "mamba_use_mlp", "layer_types", "layers_block_type")
    attention = Attention(
        num_heads=heads,
        num_kv_heads=config.positive("num_key_value_heads", heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=config.rope(head_dim, default_theta=10_000.0),
    )
    normed = config.take("mamba_rms_norm", bool, False)
    inner = config.positive("mamba_d_ssm", config.positive("mamba_expand", 2) * hidden)
    before = config.take("mamba_norm_before_gate", bool, True)
    mamba = read_mamba2(config, inner, norm if normed else None, norm_before_gate=before)
    mlp = Mlp(config.positive("intermediate_size"))
    factors = _attention_factors(config) | _mamba_factors(config, mamba) | _mlp_factors(config)

    stack = Stack("model", norm="final_layernorm")
    for _ in range(config.positive("num_hidden_layers")):
        both = Block("attn", attention, norm, beside=(Branch("linear", mamba),))
        stack.layer(both, Block("mlp", mlp, norm))
        stack.take("attn", "self_attn", ATTENTION)
        take_mamba2(stack, mamba, "linear", "mamba")
        stack.take("attn", "", {"pre_norm": "input_layernorm.weight"})
        stack.take("mlp", "", {"pre_norm": "pre_ff_layernorm.weight"})
        stack.take("mlp", "feed_forward", {"up_proj": "up_proj.weight"})
        for weight, (tensor, factor) in factors.items():
            stack.put(weight, scaled(stack.paths(tensor)[0], factor))
    return stack.family(
        config,
        "falcon_h1",
        hidden,
        norm,
        max_position=config.positive("max_position_embeddings", 8192),
        embedding_scale=config.take("embedding_multiplier", float, 1.0),
        logit_scale=config.take("lm_head_multiplier", float, 1.0),
    )


Factors = dict[str, tuple[str, float | Array]]


def _attention_factors(config: ConfigReader) -> Factors:
    into = config.take("attention_in_multiplier", float, 1.0)
    key = config.take("key_multiplier", float, 1.0)
    out = config.take("attention_out_multiplier", float, 1.0)
    by_name = {"q_proj": into, "k_proj": into * key, "v_proj": into, "o_proj": out}
    return {f"attn.{n}": (f"self_attn.{n}.weight", factor) for n, factor in by_name.items()}


def _mamba_factors(config: ConfigReader, m: Mamba2) -> Factors:
    """One factor for each kind of row of in_proj: z, x, B, C, dt."""
    into = config.take("ssm_in_multiplier", float, 1.0)
    groups = m.num_groups * m.state_size
    rows = (m.inner, m.inner, groups, groups, m.num_heads)
    kinds = config.take("ssm_multipliers", list, [1.0] * len(rows))
    vector = into * np.repeat(np.asarray(kinds, np.float32), rows)
    out = config.take("ssm_out_multiplier", float, 1.0)
    return {
        "linear.in_proj": ("mamba.in_proj.weight", vector.astype(np.float32)),
        "linear.o_proj": ("mamba.out_proj.weight", out),
    }


def _mlp_factors(config: ConfigReader) -> Factors:
    gate, down = config.take("mlp_multipliers", list, [1.0, 1.0])
    return {
        "mlp.gate_proj": ("feed_forward.gate_proj.weight", gate),
        "mlp.down_proj": ("feed_forward.down_proj.weight", down),
    }
