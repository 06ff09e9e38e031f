"""One function per model family: Hugging Face config in, HybridSpec and weight names out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine_configs.errors import UnsupportedModelError
from engine_configs.families.bamba import bamba
from engine_configs.families.config import ConfigReader
from engine_configs.families.falcon_h1 import falcon_h1
from engine_configs.families.granite import granitemoehybrid
from engine_configs.families.jamba import jamba
from engine_configs.families.kimi_linear import kimi_linear
from engine_configs.families.lfm2 import lfm2
from engine_configs.families.minimax import minimax
from engine_configs.families.nemotron_h import nemotron_h
from engine_configs.families.olmo_hybrid import olmo_hybrid
from engine_configs.families.qwen import (
    qwen3_5,
    qwen3_5_moe,
    qwen3_5_moe_text,
    qwen3_5_text,
    qwen3_next,
)
from engine_configs.families.recurrent_gemma import recurrent_gemma
from engine_configs.families.weights import Family
from engine_configs.families.zamba2 import zamba2

FAMILIES: dict[str, Callable[[ConfigReader], Family]] = {
    "bamba": bamba,
    "falcon_h1": falcon_h1,
    "granitemoehybrid": granitemoehybrid,
    "jamba": jamba,
    "kimi_linear": kimi_linear,
    "lfm2": lfm2,
    "minimax": minimax,
    "nemotron_h": nemotron_h,
    "olmo_hybrid": olmo_hybrid,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
    "qwen3_5_moe_text": qwen3_5_moe_text,
    "qwen3_5_text": qwen3_5_text,
    "qwen3_next": qwen3_next,
    "recurrent_gemma": recurrent_gemma,
    "zamba2": zamba2,
}


def read_family(config: ConfigReader) -> Family:
    """The family of a config. Raises UnsupportedModelError, ConfigError."""
    model_type = config.take("model_type", str)
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not supported",
            where=config.where,
            fix=f"Supported: {', '.join(sorted(FAMILIES))}",
        )
    family = FAMILIES[model_type](config)
    config.finish()
    return family


def read_checkpoint_config(checkpoint: Path) -> Family:
    """The family of a checkpoint directory's ``config.json``."""
    return read_family(ConfigReader.from_dir(checkpoint))
