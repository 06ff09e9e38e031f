"""What a model costs before it is converted: parameters, KV and state bytes, tokens that fit."""

from __future__ import annotations

from rich.table import Table

from build.calibrate import shortest_interval
from build.trials import CalibrationOptions
from engine_configs.names import NamedModel
from engine_configs.spec import HybridSpec
from serving.engine.profiles import BLOCK_TOKENS, PROFILES
from serving.prefix_cache.planner import CostModel
from serving.replay.checkpoint import CheckpointCodec

# Bytes of a weight (int4: with the scale of its block) and of a K/V value; recurrent states are
# fp32 everywhere.
_DTYPES = {"int4 (CPU)": (0.625, 4), "fp32 (CPU)": (4, 4), "bf16 (GPU)": (2, 2)}


def checkpoint_cost_tokens(spec: HybridSpec, bytes_per_value: int) -> float:
    """Tokens of KV that one full state checkpoint costs."""
    return spec.state_bytes(bytes_per_value) / max(1, spec.kv_bytes_per_token(bytes_per_value))


def tokens_that_fit(
    spec: HybridSpec, memory_bytes: float, bytes_per_value: int, bytes_per_weight: float
) -> int:
    """Tokens of KV that fit beside weights and one state."""
    left = memory_bytes - spec.num_parameters() * bytes_per_weight
    left -= spec.state_bytes(bytes_per_value)
    return max(0, int(left // max(1, spec.kv_bytes_per_token(bytes_per_value))))


def planned_codec(spec: HybridSpec) -> CheckpointCodec:
    """Before calibration: a quarter of each layer's units in int4."""
    slow = {i: range(-(-m.units() // 4)) for i, m in spec.state_layers()}
    return CheckpointCodec(spec, slow, "int4")


def speed_up(spec: HybridSpec, prefix: int, replayed: float, suffix: int = 64) -> float:
    """Operations of a cold prompt over those of a hit that replays ``replayed`` tokens: two per
    parameter and token, four per attended row and query channel."""
    attended = sum(4 * m.num_heads * m.head_dim for _, m in spec.attention_layers())
    cost = CostModel(token=2.0 * spec.num_parameters(), attended=float(attended))
    total = prefix + suffix
    return cost.seconds(0, 0, total) / cost.seconds(round(prefix - replayed), 0, total)


def replay_rows(spec: HybridSpec) -> dict[str, str]:
    """What split replay would cost and bring, at the default state budget."""
    codec = planned_codec(spec)
    interval = shortest_interval(spec, codec, CalibrationOptions().slow_state_budget)
    snap = interval / 2
    rows = {
        "checkpoint (1/4 of units, int4)": bytes_text(codec.nbytes()),
        "interval at 4 % of KV, mean snap": f"{interval} tokens, {snap:.0f}",
    }
    for length in (8192, 32768, 131072):
        factor = speed_up(spec, length, min(length, snap + 64))
        rows[f"predicted TTFT speed-up at {length // 1024}K"] = f"{factor:.1f}x"
    return rows


def plan_table(name: str, spec: HybridSpec, memory_gib: float) -> Table:
    """The plan of one model, a column per dtype."""
    table = Table(title=f"{name} ({spec.model_type})", title_justify="left")
    table.add_column("", no_wrap=True)
    rows: dict[str, list[str]] = {
        "parameters": [],
        "layers (attention + linear)": [],
        "weights": [],
        "KV per token": [],
        "state per sequence": [],
        "one state checkpoint costs": [],
        f"tokens that fit {memory_gib:g} GiB": [],
    }
    attention, linear = len(spec.attention_layers()), len(spec.state_layers())
    for dtype, (weight, size) in _DTYPES.items():
        table.add_column(dtype, justify="right", no_wrap=True)
        cells = [
            f"{spec.num_parameters():,}",
            f"{attention} + {linear}",
            bytes_text(spec.num_parameters() * weight),
            bytes_text(spec.kv_bytes_per_token(size)),
            bytes_text(spec.state_bytes(size)),
            f"{checkpoint_cost_tokens(spec, size):,.0f} tokens of KV",
            f"{tokens_that_fit(spec, memory_gib * 2**30, size, weight):,}",
        ]
        for row, cell in zip(rows.values(), cells, strict=True):
            row.append(cell)
    for label, values in rows.items():
        table.add_row(label, *values)
    if spec.state_layers():
        for label, value in replay_rows(spec).items():
            table.add_row(label, value)
    return table


def gpu_plan_table(name: str, spec: HybridSpec, dtype: str, memory_gib: float) -> Table:
    """The plan of one model on a GPU: weights and K/V of 2 bytes, recurrent states of 4."""
    title = f"{name} ({spec.model_type}), {dtype} on a GPU"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    for label, value in gpu_rows(spec, memory_gib).items():
        table.add_row(label, value)
    for profile in PROFILES:
        table.add_row(f"engine profile: {profile.name}", profile.text())
    if spec.state_layers():
        for label, value in replay_rows(spec).items():
            table.add_row(label, value)
    return table


def gpu_rows(spec: HybridSpec, memory_gib: float) -> dict[str, str]:
    attention, linear = len(spec.attention_layers()), len(spec.state_layers())
    per_token = sum(2 * 2 * m.num_kv_heads * m.head_dim for _, m in spec.attention_layers())
    left = memory_gib * 2**30 - spec.num_parameters() * 2 - spec.state_bytes(2)
    return {
        "parameters": f"{spec.num_parameters():,}",
        "layers (attention + linear)": f"{attention} + {linear}",
        "weights": bytes_text(spec.num_parameters() * 2),
        "KV pool per token": bytes_text(per_token),
        f"KV pool block ({BLOCK_TOKENS} tokens)": bytes_text(per_token * BLOCK_TOKENS),
        "state per sequence": bytes_text(spec.state_bytes(2)),
        "one state checkpoint costs": f"{checkpoint_cost_tokens(spec, 2):,.0f} tokens of KV",
        f"tokens that fit {memory_gib:g} GiB": f"{max(0, int(left // max(1, per_token))):,}",
    }


def list_table(models: dict[str, NamedModel]) -> Table:
    """Every known model, a row each (bytes at 2 per value)."""
    table = Table(title="Models known by name (bf16 values, fp32 states)", title_justify="left")
    for column in ("name", "weights", "parameters", "KV/token", "state", "1 checkpoint ="):
        left = column in ("name", "weights")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for model in models.values():
        spec = model.family().spec
        table.add_row(
            model.name,
            model.hub_id or "shipped here",
            f"{spec.num_parameters() / 1e9:.2f} B"
            if spec.num_parameters() > 1e8
            else f"{spec.num_parameters() / 1e6:.2f} M",
            bytes_text(spec.kv_bytes_per_token(2)),
            bytes_text(spec.state_bytes(2)),
            f"{checkpoint_cost_tokens(spec, 2):,.0f} tokens",
        )
    return table


def bytes_text(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
