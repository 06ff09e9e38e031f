"""Plays fixtures.npz on the engine of this folder and compares with what the CPU bundle answered.

Needs what serving needs (tensorrt, cuda-python, numpy, onnxruntime); exits with 1 past --max-kl.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "python"))

from serving.engine import fixtures  # noqa: E402
from serving.engine.bundle import Bundle  # noqa: E402
from serving.engine.runner import Runner  # noqa: E402
from serving.engine.tensorrt.model import TensorRTModel  # noqa: E402


def check(runner: Runner, recording: Path, max_kl: float) -> bool:
    """Print a row per turn; False when one is past ``max_kl``."""
    expected = fixtures.Recording.load(recording)
    found = fixtures.play(runner, expected.tokens, expected.turns)
    good = True
    print(f"{'turn':<20}{'max |logit error|':>20}{'KL, nats':>12}{'same token':>12}")
    for name, row in fixtures.errors(expected, found).items():
        passed = row["logit_kl"] <= max_kl
        good &= passed
        error, kl, same = (row[k] for k in ("max_abs_logit_error", "logit_kl", "same_token"))
        print(f"{name:<20}{error:>20.4f}{kl:>12.2e}{same:>12.0%}{'' if passed else '  too far'}")
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-kl", type=float, default=0.02)
    arguments = parser.parse_args()
    if not (HERE / "fixtures.npz").is_file():
        sys.exit("no fixtures.npz here: the model was too large to run in fp32 when converted")
    model = TensorRTModel.open(Bundle.open(HERE))
    sys.exit(not check(model, HERE / "fixtures.npz", arguments.max_kl))


if __name__ == "__main__":
    main()
