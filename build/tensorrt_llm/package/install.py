"""What happens when TensorRT-LLM loads the package: check every symbol, then patch two."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import wraps
from typing import Any

from .manager import ReplayManager, ReplayManagerV1, ReplayManagerV2, settings_of
from .metadata import with_replay
from .settings import ARCHITECTURE
from .symbols import SYMBOLS, Symbol, check, line_of, module_of, resolve

_MIXINS: dict[str, tuple[type[ReplayManager], str]] = {
    "1.2": (ReplayManagerV1, "KVCacheManager.__init__"),
    "1.4": (ReplayManagerV2, "KVCacheManagerV2.__init__"),
}


def install() -> str:
    """Register the model and patch the installed TensorRT-LLM; returns its line. Done once.

    Raises SymbolMismatchError, before anything was patched, where it is not as symbols.py says.
    """
    tensorrt_llm: Any = importlib.import_module("tensorrt_llm")
    line = line_of(tensorrt_llm.__version__)
    if not hasattr(tensorrt_llm, "_hybrid_trtllm"):
        check(line)
        from .engine import register_config

        register_config()
        _replace(_symbol(line, "Mamba2Metadata.prepare"), with_replay)
        _replace(_symbol(line, "get_kv_cache_manager_cls"), lambda old: _choose(old, line))
        tensorrt_llm._hybrid_trtllm = line
    return line


def _choose(choose: Callable[..., type], line: str) -> Callable[..., type]:
    """``get_kv_cache_manager_cls`` that knows our architecture; others as before."""

    @wraps(choose)
    def chosen(model_config: Any, *args: Any, **kwargs: Any) -> type:
        if ARCHITECTURE not in (model_config.pretrained_config.architectures or ()):
            return choose(model_config, *args, **kwargs)
        return manager_class(line, model_config)

    return chosen


def manager_class(line: str, model_config: Any) -> type:
    """The line's attention-only manager with states beside it, for one model."""
    mixin, name = _MIXINS[line]
    symbol = _symbol(line, name)
    base = getattr(module_of(symbol), name.partition(".")[0])
    return type(mixin.__name__, (mixin, base), {"settings": settings_of(model_config)})


def _symbol(line: str, name: str) -> Symbol:
    return next(s for s in SYMBOLS[line] if s.name == name)


def _replace(symbol: Symbol, wrap: Callable[[Any], Any]) -> None:
    owner: Any = module_of(symbol)
    *path, last = symbol.name.split(".")
    for part in path:
        owner = getattr(owner, part)
    setattr(owner, last, wrap(resolve(symbol)))
