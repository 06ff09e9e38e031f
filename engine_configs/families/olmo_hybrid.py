"""OLMo-Hybrid: Gated DeltaNet layers (norm before) and full attention layers (norm after)."""

from __future__ import annotations

from engine_configs.errors import ConfigError
from engine_configs.families.config import ConfigReader
from engine_configs.families.weights import Family, Sources, conv1d, joined_conv1d, named
from engine_configs.spec import Attention, Block, GatedDeltaNet, HybridSpec, Mlp, Norm

_ATTN = {name: f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
_ATTN |= {"q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight"}
_GDN = {
    name: f"linear_attn.{name}.weight"
    for name in ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj", "o_norm", "o_proj")
}
_GDN |= {"A_log": "linear_attn.A_log", "dt_bias": "linear_attn.dt_bias"}
_MLP = {name: f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")}


def olmo_hybrid(config: ConfigReader) -> Family:
    """transformers/models/olmo_hybrid. RoPE is absent in the released checkpoints."""
    hidden = config.positive("hidden_size")
    heads = config.positive("num_attention_heads")
    head_dim = config.positive("head_dim", hidden // heads)
    k_heads = config.positive("linear_num_key_heads", heads)
    key_dim = config.positive("linear_key_head_dim", int(0.75 * hidden / k_heads))
    norm = Norm(config.take("rms_norm_eps", float, 1e-6))
    config.expect("hidden_act", "silu")
    config.expect("attention_bias", False)
    attention = Attention(
        num_heads=heads,
        num_kv_heads=config.positive("num_key_value_heads", heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=config.rope(head_dim, default_theta=10_000.0),
        qk_norm=norm,
        qk_norm_over="all",
    )
    linear = GatedDeltaNet(
        num_k_heads=k_heads,
        num_v_heads=config.positive("linear_num_value_heads", heads),
        key_dim=key_dim,
        value_dim=config.positive("linear_value_head_dim", 2 * key_dim),
        conv_width=config.positive("linear_conv_kernel_dim", 4),
        norm_eps=1e-5,  # fixed in the modeling code, not in the config
        beta_scale=2.0 if config.take("linear_allow_neg_eigval", bool, True) else 1.0,
    )
    mlp = Mlp(config.positive("intermediate_size"))
    count = config.positive("num_hidden_layers")
    default = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(count)]
    types = config.take("layer_types", list, default)
    if len(types) != count:
        raise ConfigError(f"layer_types has {len(types)} entries, not {count}", where=config.where)
    config.ignore(*(k for k in config.data if k.startswith(("linear_a_log_", "linear_dt_"))))

    layers: list[tuple[Block, ...]] = []
    sources: dict[str, Sources] = {
        "embed": named("model.embed_tokens.weight"),
        "final_norm": named("model.norm.weight"),
        "lm_head": named("lm_head.weight"),
    }
    for i, kind in enumerate(types):
        here = f"model.layers.{i}"
        # transformers renames norms and joins the convolutions on loading; both spellings occur.
        post = (f"{here}.post_attention_layernorm.weight", f"{here}.feedforward_layer_norm.weight")
        if kind == "full_attention":
            blocks = (Block("attn", attention, post_norm=norm), Block("mlp", mlp, post_norm=norm))
            names = {f"attn.{k}": v for k, v in _ATTN.items()}
            sources[f"layers.{i}.attn.post_norm"] = named(*post)
            sources[f"layers.{i}.mlp.post_norm"] = named(
                f"{here}.post_feedforward_layernorm.weight"
            )
        elif kind == "linear_attention":
            blocks = (Block("linear", linear, pre_norm=norm), Block("mlp", mlp, pre_norm=norm))
            names = {f"linear.{k}": v for k, v in _GDN.items()}
            sources[f"layers.{i}.linear.pre_norm"] = named(
                f"{here}.input_layernorm.weight", f"{here}.attention_layer_norm.weight"
            )
            sources[f"layers.{i}.mlp.pre_norm"] = named(*post)
            mixer = f"{here}.linear_attn"
            parts = [f"{mixer}.{n}_conv1d.weight" for n in ("q", "k", "v")]
            sources[f"layers.{i}.linear.conv"] = (
                conv1d(f"{mixer}.conv1d.weight"),
                joined_conv1d(*parts),
            )
        else:
            raise ConfigError(f"layer_types[{i}] is {kind!r}", where=config.where)
        names |= {f"mlp.{k}": v for k, v in _MLP.items()}
        sources |= {f"layers.{i}.{k}": named(f"{here}.{v}") for k, v in names.items()}
        layers.append(blocks)

    spec = HybridSpec(
        model_type="olmo_hybrid",
        vocab_size=config.positive("vocab_size"),
        hidden_size=hidden,
        layers=tuple(layers),
        final_norm=norm,
        max_position=config.positive("max_position_embeddings", 65536),
        tie_embeddings=config.take("tie_word_embeddings", bool, False),
        bos_token_id=next(iter(config.token_ids("bos_token_id")), None),
        eos_token_ids=config.token_ids("eos_token_id"),
    )
    return Family(spec, sources)
