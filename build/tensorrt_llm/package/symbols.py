"""Every TensorRT-LLM symbol that the package patches, overrides or calls, once.

None of them is a promise of TensorRT-LLM's. `check` compares the installed package with this table
before anything is patched and raises one error where they differ.

What the rows were read from. Neither the sources of the tag v1.2.1 nor those of v1.4.0rc1 were at
hand: the published packages are stubs. Rows of line 1.2 follow texts of the repository's main
branch from before KVCacheManagerV2 came (early 2026, when 1.2.0rc8 was out), rows of line 1.4 texts
of main of 2026, with the commit where it was known. So a row is what those texts say, not what a
release was seen to have; `check` decides on the spot.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from engine_configs.errors import LaunchError

ROOT = "tensorrt_llm._torch"
_V1 = f"{ROOT}.pyexecutor.resource_manager"
_V2 = (
    f"{ROOT}.pyexecutor.kv_cache.kv_cache_manager_v2",
    f"{ROOT}.pyexecutor.kv_cache_manager_v2",
)
_MAIN = "main before KVCacheManagerV2"
_NEW = "main at 0004396720054fd8e205cbf616f21f0b57c6b412"


class SymbolMismatchError(LaunchError):
    """The installed TensorRT-LLM is not the one this package was written for."""


@dataclass(frozen=True)
class Symbol:
    """``name`` in one of ``modules`` (where it has been over time, newest first).

    use: "replaced" and "overridden" need exactly ``parameters``, "called" at least those, in this
    order; a leading * or ** as in a signature; ``read``: the text the row was read from.
    """

    modules: tuple[str, ...]
    name: str
    use: Literal["replaced", "overridden", "called"]
    parameters: tuple[str, ...]
    read: str

    @property
    def path(self) -> str:
        return f"{self.modules[0]}.{self.name}"


def _symbol(
    modules: str | tuple[str, ...], name: str, use: Any, parameters: str, read: str
) -> Symbol:
    where = (modules,) if isinstance(modules, str) else modules
    return Symbol(where, name, use, tuple(parameters.split()), read)


_SHARED = (
    _symbol(
        f"{ROOT}.modules.mamba.mamba2_metadata", "Mamba2Metadata.prepare", "replaced",
        "self attn_metadata", f"{_MAIN}; main at 04fa7c4c7fa50f02992d7f5a2e3cb85a020f1629",
    ),
    _symbol(
        f"{ROOT}.models.modeling_utils", "register_auto_model", "called", "name",
        f"{_MAIN}; main of 2026",
    ),
    _symbol(
        f"{ROOT}.models.modeling_utils", "DecoderModelForCausalLM.__init__", "called",
        "self model config hidden_size vocab_size", f"{_MAIN}; main of 2026",
    ),
)  # fmt: skip

# By line of releases: what must be there.
SYMBOLS: dict[str, tuple[Symbol, ...]] = {
    "1.2": (
        *_SHARED,
        _symbol(
            f"{ROOT}.pyexecutor._util", "get_kv_cache_manager_cls", "replaced",
            "model_config", _MAIN,
        ),
        _symbol(
            _V1, "KVCacheManager.__init__", "called",
            "self kv_cache_config kv_cache_type num_layers num_kv_heads head_dim tokens_per_block "
            "max_seq_len max_batch_size mapping dtype layer_mask **kwargs", _MAIN,
        ),
        _symbol(
            _V1, "KVCacheManager.prepare_resources", "overridden", "self scheduled_batch", _MAIN
        ),
        _symbol(
            _V1, "KVCacheManager.update_resources", "overridden",
            "self scheduled_batch attn_metadata kv_cache_dtype_byte_size", _MAIN,
        ),
        _symbol(
            _V1, "KVCacheManager.free_resources", "overridden", "self request pin_on_release",
            _MAIN,
        ),
        _symbol(
            _V1, "KVCacheManager.add_dummy_requests", "called", "self request_ids token_nums",
            _MAIN,
        ),
        _symbol(
            _V1, "KVCacheManager.get_cache_size_per_token", "overridden",
            "model_config mapping **kwargs", _MAIN,
        ),
        _symbol(
            _V1, "KVCacheManager.get_batch_cache_indices", "called", "self request_ids", _MAIN
        ),
        _symbol(_V1, "KVCacheManager.get_buffers", "called", "self layer_idx", _MAIN),
    ),
    "1.4": (
        *_SHARED,
        _symbol(
            f"{ROOT}.pyexecutor._util", "get_kv_cache_manager_cls", "replaced",
            "model_config kv_cache_config is_disagg cache_transceiver_config", "main of 2026",
        ),
        _symbol(
            _V2, "KVCacheManagerV2.__init__", "called",
            "self kv_cache_config kv_cache_type num_layers num_kv_heads head_dim tokens_per_block "
            "max_seq_len max_batch_size mapping dtype layer_mask **kwargs", _NEW,
        ),
        _symbol(_V2, "KVCacheManagerV2.prepare_context", "overridden", "self req", _NEW),
        _symbol(
            _V2, "KVCacheManagerV2.prepare_resources", "overridden", "self scheduled_batch", _NEW
        ),
        _symbol(
            _V2, "KVCacheManagerV2.update_resources", "overridden",
            "self scheduled_batch attn_metadata kv_cache_dtype_byte_size", _NEW,
        ),
        _symbol(_V2, "KVCacheManagerV2.try_commit_blocks", "called", "self request", _NEW),
        _symbol(
            _V2, "KVCacheManagerV2.free_resources", "overridden", "self request pin_on_release",
            _NEW,
        ),
        _symbol(
            _V2, "KVCacheManagerV2.add_dummy_requests", "called", "self request_ids token_nums",
            _NEW,
        ),
        _symbol(
            _V2, "KVCacheManagerV2.get_cache_size_per_token", "called",
            "model_config mapping max_batch_size **kwargs", _NEW,
        ),
        _symbol(
            _V2, "KVCacheManagerV2.get_batch_cache_indices", "called",
            "self request_ids layer_idx", _NEW,
        ),
        _symbol(_V2, "KVCacheManagerV2.get_buffers", "called", "self layer_idx kv_layout", _NEW),
    ),
}  # fmt: skip


def line_of(version: str) -> str:
    """The line of releases of ``version``. Raises SymbolMismatchError for one not written for."""
    line = ".".join(version.split(".")[:2])
    if line not in SYMBOLS:
        raise SymbolMismatchError(
            f"symbol tensorrt_llm.__version__: expected {' or '.join(f'{x}.x' for x in SYMBOLS)}, "
            f"found {version}",
            where="hybrid_trtllm",
            fix="Install what requirements/tensorrt-llm.txt names",
        )
    return line


def check(line: str) -> None:
    """Raises SymbolMismatchError for the first symbol that is not as in the table."""
    for symbol in SYMBOLS[line]:
        found = _found(symbol)
        if not _agrees(symbol, found):
            raise SymbolMismatchError(
                f"symbol {symbol.path}: expected {_signature(symbol.parameters)}"
                f"{'' if symbol.use != 'called' else ' among its parameters'}, found {found}",
                where="hybrid_trtllm",
                fix=f"Nothing was patched. The row was read from {symbol.read}; install another "
                "TensorRT-LLM or bring package/symbols.py up to date",
            )


def module_of(symbol: Symbol) -> ModuleType:
    """The first of its modules that is there. Raises ImportError."""
    for name in symbol.modules:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as e:
            if not name.startswith(e.name or ""):
                raise  # it is there, but something that it needs is not
    raise ImportError(f"no module {' or '.join(symbol.modules)}")


def resolve(symbol: Symbol) -> Any:
    """The object itself. Raises ImportError, AttributeError."""
    found: Any = module_of(symbol)
    for part in symbol.name.split("."):
        found = inspect.getattr_static(found, part)
    return found.__func__ if isinstance(found, staticmethod | classmethod) else found


def _found(symbol: Symbol) -> str:
    """Its signature as written, or why it has none."""
    try:
        return _signature(tuple(_parameters(resolve(symbol))))
    except (ImportError, AttributeError, TypeError, ValueError) as e:
        return f"nothing ({e})"


def _parameters(function: Any) -> Iterator[str]:
    for name, parameter in inspect.signature(function).parameters.items():
        many = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        yield many.get(parameter.kind, "") + name  # type: ignore[call-overload]


def _signature(parameters: tuple[str, ...]) -> str:
    return f"({', '.join(parameters)})"


def _agrees(symbol: Symbol, found: str) -> bool:
    if symbol.use != "called":
        return found == _signature(symbol.parameters)
    names = iter(found.strip("()").split(", "))
    return all(wanted in names for wanted in symbol.parameters)  # in this order
