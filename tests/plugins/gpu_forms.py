"""The GPU forms of the PyTorch ops in Triton-lang's interpreter against their CPU forms.

``TRITON_INTERPRET=1 python -m tests.plugins.gpu_forms`` prints the largest difference of each; the
interpreter is chosen when triton is first imported, so it takes a process of its own.
"""

from __future__ import annotations

import torch

from plugins.compressed_sparse_attention import torch_op as attention
from plugins.linear_state_replay import torch_op as linear
from tests.plugins.paged import Paged, ints

TOTALS, LENGTHS, STARTS = (23, 8, 40), (7, 1, 20), (0, 7, 8)  # a replay, decode, a suffix


def main() -> None:
    torch.manual_seed(0)
    paged = Paged(TOTALS, 2, 16, 16)
    for pool in (paged.pool_k, paged.pool_v):
        pool.nan_to_num_()
    q = torch.randn(28, 4, 16)
    bounds = (ints(*STARTS), ints(*LENGTHS))
    given = (q, paged.pool_k, paged.pool_v, paged.table, *bounds, ints(*TOTALS), 20, 0.3)
    got, want = attention._paged_on_gpu(*given, 5), attention.paged_attention(*given, 5)
    report("paged_attention", got, want)
    selected = torch.tensor([[[2, 0], [1, -1]], [[0, -1], [0, -1]], [[4, 3], [0, 2]]]).int()
    one = (q[:3], paged.pool_k, paged.pool_v, paged.table, ints(*TOTALS), selected, 0.3)
    report("sparse_decode_attention", attention._sparse_on_gpu(*one),
           attention.sparse_decode_attention(*one))  # fmt: skip
    k = torch.nn.functional.normalize(torch.randn(28, 2, 16), dim=-1)
    v, decay, beta = torch.randn(28, 4, 16), -torch.rand(28, 4), torch.rand(28, 4)
    pool = torch.randn(5, 4, 16, 16)
    same, q2 = pool.clone(), q[:, :2].contiguous()
    rest = (decay, beta, *bounds, ints(3, 0, 4), 20, "gated_delta", 0.5)
    got = linear._on_gpu(q2, k, v, pool, *rest)
    want = linear.linear_state_replay(q2, k, v, same, *rest)
    report("linear_state_replay", (got, pool), (want, same))


def report(name: str, got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    print(name, max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True)), sep="\t")


if __name__ == "__main__":
    main()
