"""What the Triton-lang kernels of all ops share."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def span(starts, lengths, b, T):
    """First row and number of rows of sequence b. Null pointers: row b of [B, T], all of it."""
    first = b.to(tl.int64) * T
    count = T
    if starts is not None:
        given = starts.to(tl.int64) != 0
        first = tl.where(given, tl.load(starts + b, mask=given, other=0).to(tl.int64), first)
    if lengths is not None:
        given = lengths.to(tl.int64) != 0
        count = tl.load(lengths + b, mask=given, other=T)
    return first, count


@triton.jit
def product(a, b):
    """a b [.., fp32] of operands of one type."""
    if INTERPRETED:  # whose bf16 is an integer to numpy
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")
