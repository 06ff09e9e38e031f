"""A server's /metrics page as numbers by name and labels."""

from __future__ import annotations

import time
import urllib.request

# The cache's metrics are pushed twice a second.
SETTLE_SECONDS = 1.2


def scrape(url: str, settle: float = SETTLE_SECONDS) -> dict[str, float]:
    """``{'hybrid_tokens_total{kind="cached"}': 3.0, ...}`` of our own metrics."""
    time.sleep(settle)
    with urllib.request.urlopen(url, timeout=10) as page:
        lines = page.read().decode().splitlines()
    rows = (line.rsplit(" ", 1) for line in lines if line.startswith("hybrid_"))
    return {name: float(value) for name, value in rows}
