"""What every mixer answers."""

from __future__ import annotations

from dataclasses import dataclass

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Norm:
    """RMS norm: ``x / rms(x) * (weight + offset)``; offset 1 for the Gemma and Qwen3.5 spelling."""

    eps: float
    offset: float = 0.0


@dataclass(frozen=True)
class MixerBase:
    """What a mixer answers; the defaults are those of a mixer that keeps nothing."""

    def weights(self, hidden: int) -> Shapes:
        """Shape of each weight by its name within the mixer."""
        raise NotImplementedError

    def kv_per_token(self) -> int:
        """Values kept of each token for as long as the sequence lives."""
        return 0

    def conv_state(self) -> tuple[int, ...]:
        """[W-1, channels]: the last inputs of the convolution, oldest first."""
        return ()

    def recurrent_state(self) -> tuple[int, ...]:
        """[Hv, dk, dv]."""
        return ()

    def units(self) -> int:
        """Parts of the state with a decay of their own."""
        return 0
