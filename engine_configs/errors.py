"""Every error a user can meet, in one tree.

HybridServeError
├── ConfigError          a config key is unknown, missing or has a value we cannot serve
├── UnsupportedModelError  no family is known for this model type
├── CheckpointError      weights are missing, extra, truncated, of the wrong shape or unsafe to read
├── ConversionError      a conversion stage failed; nothing was written
│   └── ParityError      the converted graph disagrees with the reference model
├── BundleError          a bundle on disk is not one, or is damaged
├── DeviceError          a GPU is not there, or failed
├── RequestError         one request is invalid; the server goes on
│   ├── PromptTooLongError
│   └── ReplayRefusedError  the asked replay would not be what the caller expects
├── LaunchError          the Triton server is not there, does not start, or does not stay up
│   └── SymbolMismatchError  an installed runtime is not the one a package was written for
│                            (build/tensorrt_llm/package/symbols.py)
├── OverloadedError      admission is full; try again later
├── ServerError          a server answered with an error, or not at all (client side)
├── CancelledError       the caller gave the request up
└── CacheError           the prefix cache could not do it; the engine recomputes
"""

from __future__ import annotations


class HybridServeError(Exception):
    """Base: ``what`` happened ``where``, and what to do about it (``fix``)."""

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        text = f"{where}: {what}" if where else what
        super().__init__(f"{text}. {fix}" if fix else text)


class ConfigError(HybridServeError):
    """A config key is unknown, missing, or holds a value we cannot serve."""


class UnsupportedModelError(HybridServeError):
    """No family is known for this model type."""


class CheckpointError(HybridServeError):
    """Weights are missing, extra, truncated, of the wrong shape, or unsafe to read."""


class ConversionError(HybridServeError):
    """A conversion stage failed; nothing was written."""


class ParityError(ConversionError):
    """The converted graph disagrees with the reference model."""


class BundleError(HybridServeError):
    """A bundle on disk is not one, or is damaged."""


class DeviceError(HybridServeError):
    """A GPU is not there, or failed."""


class RequestError(HybridServeError):
    """One request is invalid; the server goes on."""


class PromptTooLongError(RequestError):
    """Prompt plus wanted tokens exceed the longest sequence this bundle serves."""


class ReplayRefusedError(RequestError):
    """The asked replay would not be what the caller expects."""


class LaunchError(HybridServeError):
    """The Triton server is not there, does not start, or does not stay up."""


class OverloadedError(HybridServeError):
    """Admission is full; try again later."""


class ServerError(HybridServeError):
    """A server answered with an error, or not at all (client side)."""


class CancelledError(HybridServeError):
    """The caller gave the request up."""


class CacheError(HybridServeError):
    """The prefix cache could not do it; the engine recomputes."""
