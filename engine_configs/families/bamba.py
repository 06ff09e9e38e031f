"""Bamba: Mamba-2 or attention with RoPE over half a head, then an MLP."""

from __future__ import annotations

from engine_configs.families.config import ConfigReader
from engine_configs.families.mamba import read_mamba2, take_mamba2
from engine_configs.families.stack import ATTENTION, MLP, Stack
from engine_configs.families.weights import Family
from engine_configs.spec import Attention, Block, Mlp, Norm


def bamba(config: ConfigReader) -> Family:
    """transformers/models/bamba."""
    hidden = config.positive("hidden_size")
    heads = config.positive("num_attention_heads")
    head_dim = hidden // heads
    norm = Norm(config.take("rms_norm_eps", float, 1e-5))
    config.expect("hidden_act", "silu")
    config.expect("attention_bias", False)
    config.expect("mlp_bias", False)
    # The share of a head that is rotated is fixed in the modeling code.
    config.expect("attn_rotary_emb", head_dim // 2)
    config.expect("partial_rotary_factor", 0.5)
    config.ignore("num_logits_to_keep", "z_loss_coefficient")
    attention = Attention(
        num_heads=heads,
        num_kv_heads=config.positive("num_key_value_heads", heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=config.rope(head_dim, default_theta=10_000.0, rotary_share=0.5),
    )
    mamba = read_mamba2(config, config.positive("mamba_expand", 2) * hidden, norm)
    mlp = Mlp(config.positive("intermediate_size"))
    attending = config.take("attn_layer_indices", list, [])

    stack = Stack("model", norm="final_layernorm")
    for i in range(config.positive("num_hidden_layers")):
        if i in attending:
            stack.layer(Block("attn", attention, norm), Block("mlp", mlp, norm))
            stack.take("attn", "self_attn", ATTENTION)
        else:
            stack.layer(Block("linear", mamba, norm), Block("mlp", mlp, norm))
            take_mamba2(stack, mamba, "linear", "mamba")
        stack.take(stack.layers[-1][0].name, "", {"pre_norm": "input_layernorm.weight"})
        stack.take("mlp", "", {"pre_norm": "pre_ff_layernorm.weight"})
        stack.take("mlp", "feed_forward", MLP)
    return stack.family(
        config,
        "bamba",
        hidden,
        norm,
        max_position=config.positive("max_position_embeddings", 262144),
    )
