"""Metrics of several completions of a problem."""

from __future__ import annotations

from math import comb


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that one of k completions is correct, of n completions of which c are.

    The estimate has no bias: 1 - C(n - c, k) / C(n, k) (Chen et al., 2021, section 2.1). Raises `ValueError` unless
    `0 <= c <= n` and `1 <= k <= n`.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass_at_k needs 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    return 1 - comb(n - c, k) / comb(n, k)
