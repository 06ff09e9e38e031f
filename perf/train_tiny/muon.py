"""Muon (Jordan et al. 2024) in fp32, with matrices of one shape orthogonalised as one batch.

torch.optim.Muon runs one bfloat16 Newton-Schulz per matrix, which takes as long as the rest of a
training step on a CPU without bfloat16 units.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices, about (singular values in 0.7-1.2): [N, rows, columns]."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + torch.baddbmm(b * gram, gram, gram, alpha=c) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum whose step is orthogonalised; for 2-D parameters only."""

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                shapes[tuple(parameter.shape)].append(parameter)
            for (rows, columns), parameters in shapes.items():
                updates = orthogonalise(
                    torch.stack([self._nesterov(p, group["momentum"]) for p in parameters])
                )
                rate = group["lr"] * max(1.0, rows / columns) ** 0.5
                for parameter, update in zip(parameters, updates, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.sub_(update, alpha=rate)

    def _nesterov(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["velocity"] = torch.zeros_like(parameter)
        velocity = state["velocity"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(velocity, momentum)
