"""LFM2: gated short convolutions, every few layers attention; then an MLP."""

from __future__ import annotations

from engine_configs.errors import ConfigError
from engine_configs.families.config import ConfigReader
from engine_configs.families.stack import Stack
from engine_configs.families.weights import Family
from engine_configs.spec import Attention, Block, Mlp, Norm, ShortConv

_ATTENTION = {n: f"{n}.weight" for n in ("q_proj", "k_proj", "v_proj")}
_ATTENTION |= {
    "o_proj": "out_proj.weight",
    "q_norm": "q_layernorm.weight",
    "k_norm": "k_layernorm.weight",
}
_CONV = {"in_proj": "in_proj.weight", "o_proj": "out_proj.weight"}
_MLP = {"gate_proj": "w1.weight", "up_proj": "w3.weight", "down_proj": "w2.weight"}
# Written by Liquid's own trainer; transformers does not read them either.
_IGNORED = ["block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale"]
_IGNORED += ["block_use_swiglu", "block_use_xavier_init", "conv_dim", "conv_dim_out"]
_IGNORED += ["conv_use_xavier_init", "num_heads", "use_pos_enc", "theta", "tie_embedding"]


def lfm2(config: ConfigReader) -> Family:
    """transformers/models/lfm2."""
    hidden = config.positive("hidden_size")
    heads = config.positive("num_attention_heads")
    head_dim = config.positive("head_dim", hidden // heads)
    norm = Norm(config.take("norm_eps", float, 1e-5))
    config.expect("conv_bias", False)
    config.ignore(*_IGNORED)
    attention = Attention(
        num_heads=heads,
        num_kv_heads=config.positive("num_key_value_heads", heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=config.rope(head_dim, default_theta=1_000_000.0),
        qk_norm=norm,
    )
    conv = ShortConv(hidden, config.positive("conv_L_cache", 3))
    mlp = Mlp(_intermediate(config))
    count = config.positive("num_hidden_layers")
    attending = config.take("full_attn_idxs", list, list(range(count)))
    default = ["full_attention" if i in attending else "conv" for i in range(count)]

    stack = Stack("model", norm="embedding_norm")
    for i, kind in enumerate(config.take("layer_types", list, default)):
        if kind == "full_attention":
            stack.layer(Block("attn", attention, norm), Block("mlp", mlp, norm))
            stack.take("attn", "self_attn", _ATTENTION)
        elif kind == "conv":
            stack.layer(Block("conv", conv, norm), Block("mlp", mlp, norm))
            stack.take("conv", "conv", _CONV)
            stack.conv("conv.conv", "conv.conv")
        else:
            raise ConfigError(f"layer_types[{i}] is {kind!r}", where=config.where)
        stack.take(stack.layers[-1][0].name, "", {"pre_norm": "operator_norm.weight"})
        stack.take("mlp", "", {"pre_norm": "ffn_norm.weight"})
        stack.take("mlp", "feed_forward", _MLP)
    return stack.family(
        config,
        "lfm2",
        hidden,
        norm,
        max_position=config.positive("max_position_embeddings", 128_000),
        tied=config.data.get("tie_embedding", True),
    )


def _intermediate(config: ConfigReader) -> int:
    """Width of the MLP: two thirds of the configured one, rounded up to a multiple."""
    size = config.positive("intermediate_size", 12288)
    size = config.positive("block_ff_dim", size)
    multiple = config.positive("block_multiple_of", 256)
    factor = config.take("block_ffn_dim_multiplier", float, 1.0)
    if not config.take("block_auto_adjust_ff_dim", bool, True):
        return size
    return -(-int(factor * int(2 * size / 3)) // multiple) * multiple
