"""Qwen3-Next and Qwen3.5: Gated DeltaNet and gated attention, MLPs or mixtures of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from engine_configs.families.config import ConfigReader
from engine_configs.families.stack import MLP, Stack
from engine_configs.families.weights import Array, Family, named, part
from engine_configs.spec import Attention, Block, GatedDeltaNet, Mlp, Moe, Norm

_DELTA = {
    "A_log": "A_log",
    "dt_bias": "dt_bias",
    "o_norm": "norm.weight",
    "o_proj": "out_proj.weight",
}


def qwen3_next(config: ConfigReader) -> Family:
    """transformers/models/qwen3_next: one fused projection for q, k, v, z and one for b, a."""
    return _qwen(config, "qwen3_next", _fused_projections, moe=True)


def qwen3_5_text(config: ConfigReader) -> Family:
    """transformers/models/qwen3_5, the text model."""
    return _qwen(config, "qwen3_5_text", _split_projections, moe=False)


def qwen3_5_moe_text(config: ConfigReader) -> Family:
    """transformers/models/qwen3_5_moe, the text model."""
    return _qwen(config, "qwen3_5_moe_text", _split_projections, moe=True)


def qwen3_5(config: ConfigReader) -> Family:
    """The text model inside a vision-language checkpoint."""
    return qwen3_5_text(_text_config(config, "qwen3_5_text"))


def qwen3_5_moe(config: ConfigReader) -> Family:
    """The text model inside a vision-language checkpoint."""
    return qwen3_5_moe_text(_text_config(config, "qwen3_5_moe_text"))


def _text_config(config: ConfigReader, model_type: str) -> ConfigReader:
    config.ignore("vision_config", *(k for k in config.data if k.endswith("_token_id")))
    text = config.child("text_config")
    text.expect("model_type", model_type)
    return text


def _qwen(
    config: ConfigReader,
    model_type: str,
    projections: Callable[[Stack, GatedDeltaNet, int], None],
    *,
    moe: bool,
) -> Family:
    hidden = config.positive("hidden_size")
    norm = Norm(config.take("rms_norm_eps", float, 1e-6), offset=1.0)
    head_dim = config.positive("head_dim", 256)
    config.expect("hidden_act", "silu")
    config.expect("attention_bias", False)
    share = config.take("partial_rotary_factor", float, 0.25)
    attention = Attention(
        num_heads=config.positive("num_attention_heads"),
        num_kv_heads=config.positive("num_key_value_heads"),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=config.rope(head_dim, default_theta=10_000.0, rotary_share=share),
        qk_norm=norm,
        gated=True,
    )
    delta = GatedDeltaNet(
        num_k_heads=config.positive("linear_num_key_heads", 16),
        num_v_heads=config.positive("linear_num_value_heads", 32),
        key_dim=config.positive("linear_key_head_dim", 128),
        value_dim=config.positive("linear_value_head_dim", 128),
        conv_width=config.positive("linear_conv_kernel_dim", 4),
        norm_eps=norm.eps,
    )
    config.expect("attn_output_gate", True)
    config.ignore("router_aux_loss_coef", "output_router_logits", "mamba_ssm_dtype")
    config.ignore(*(k for k in config.data if k.startswith("mtp_")))
    mixers = _mlps(config, moe=moe)
    layers = range(1, len(mixers) + 1)
    interval = config.positive("full_attention_interval", 4)
    default = ["full_attention" if i % interval == 0 else "linear_attention" for i in layers]

    # The second is how the text model lies in a vision-language checkpoint.
    stack = Stack("model", "model.language_model")
    stack.unused += ["mtp.", "model.visual."]
    for kind, mlp in zip(config.layer_types(len(mixers), default), mixers, strict=True):
        second = "moe" if isinstance(mlp, Moe) else "mlp"
        if kind == "full_attention":
            stack.layer(Block("attn", attention, norm), Block(second, mlp, norm))
            _attention_sources(stack, attention, hidden)
        else:
            stack.layer(Block("linear", delta, norm), Block(second, mlp, norm))
            stack.take("linear", "linear_attn", _DELTA)
            stack.conv("linear.conv", "linear_attn.conv1d")
            projections(stack, delta, hidden)
        first = stack.layers[-1][0].name
        stack.take(first, "", {"pre_norm": "input_layernorm.weight"})
        stack.take(second, "", {"pre_norm": "post_attention_layernorm.weight"})
        if isinstance(mlp, Moe):
            _moe_sources(stack, mlp)
        else:
            stack.take("mlp", "mlp", MLP)
    return stack.family(
        config,
        model_type,
        hidden,
        norm,
        max_position=config.positive("max_position_embeddings", 32768),
    )


def _mlps(config: ConfigReader, *, moe: bool) -> list[Mlp | Moe]:
    """The second mixer of each layer."""
    count = config.positive("num_hidden_layers")
    if not moe:
        config.expect("mlp_only_layers", None, [])
        return [Mlp(config.positive("intermediate_size"))] * count
    experts = _moe(config)
    step, dense = (
        config.positive("decoder_sparse_step", 1),
        config.take("mlp_only_layers", list, []),
    )
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(count)]
    if all(sparse):
        config.ignore("intermediate_size")
        return [experts] * count
    mlp = Mlp(config.positive("intermediate_size"))
    return [experts if s else mlp for s in sparse]


def _moe(config: ConfigReader) -> Moe:
    return Moe(
        num_experts=config.positive("num_experts"),
        top_k=config.positive("num_experts_per_tok"),
        intermediate=config.positive("moe_intermediate_size"),
        shared=Mlp(config.positive("shared_expert_intermediate_size")),
        shared_gate=True,
        normalize=config.take("norm_topk_prob", bool, True),
    )


def _attention_sources(stack: Stack, m: Attention, hidden: int) -> None:
    """q_proj holds each head's query rows and then its gate rows."""
    names = ("k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    stack.take("attn", "self_attn", {n: f"{n}.weight" for n in names})
    full = (2 * m.num_heads * m.head_dim, hidden)
    for weight, half in (("q_proj", 0), ("g_proj", 1)):
        rows = _rows_of_heads(m.num_heads, [m.head_dim, m.head_dim], half)
        stack.put(f"attn.{weight}", part(full, rows, *stack.paths("self_attn.q_proj.weight")))


def _fused_projections(stack: Stack, m: GatedDeltaNet, hidden: int) -> None:
    """Per key head: its q, its k, then v and z of its value heads; likewise b and a."""
    group = m.num_v_heads // m.num_k_heads
    sizes = [m.key_dim, m.key_dim, group * m.value_dim, group * m.value_dim]
    _put_parts(stack, "in_proj_qkvz", m.num_k_heads, sizes, hidden, "qkvg")
    _put_parts(stack, "in_proj_ba", m.num_k_heads, [group, group], hidden, "ba")


def _split_projections(stack: Stack, m: GatedDeltaNet, hidden: int) -> None:
    k, v = m.num_k_heads * m.key_dim, m.num_v_heads * m.value_dim
    _put_parts(stack, "in_proj_qkv", 1, [k, k, v], hidden, "qkv")
    names = {"g_proj": "in_proj_z.weight", "a_proj": "in_proj_a.weight"}
    stack.take("linear", "linear_attn", names | {"b_proj": "in_proj_b.weight"})


def _put_parts(
    stack: Stack, tensor: str, heads: int, sizes: Sequence[int], hidden: int, names: str
) -> None:
    paths = stack.paths(f"linear_attn.{tensor}.weight")
    for i, name in enumerate(names):
        read = _rows_of_heads(heads, sizes, i)
        stack.put(f"linear.{name}_proj", part((heads * sum(sizes), hidden), read, *paths))


def _rows_of_heads(heads: int, sizes: Sequence[int], which: int) -> Callable[[Array], Array]:
    """Of rows laid out [heads, sum(sizes)], those of one size from every head."""
    start = sum(sizes[:which])

    def read(w: Array) -> Array:
        split = w.reshape(heads, sum(sizes), -1)[:, start : start + sizes[which]]
        return np.ascontiguousarray(split).reshape(heads * sizes[which], -1)

    return read


def _moe_sources(stack: Stack, m: Moe) -> None:
    stack.take("moe", "mlp", {"router": "gate.weight", "shared_gate": "shared_expert_gate.weight"})
    stack.take("moe.shared", "mlp.shared_expert", MLP)
    stack.put("moe.experts.in_proj", named(*stack.paths("mlp.experts.gate_up_proj")))
    stack.put("moe.experts.down_proj", named(*stack.paths("mlp.experts.down_proj")))
    stack.experts("moe.experts.in_proj", "mlp.experts", m.num_experts, ["gate_proj", "up_proj"])
    stack.experts("moe.experts.down_proj", "mlp.experts", m.num_experts, ["down_proj"])
