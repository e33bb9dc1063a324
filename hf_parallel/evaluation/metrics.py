"""Metrics of several completions of a problem."""

from math import comb


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate the probability that at least one of k completions is correct, from n completions with c correct ones.

    The estimate 1 - C(n - c, k) / C(n, k) is unbiased (Chen et al., 2021, section 2.1). Raises `ValueError` unless
    `0 <= c <= n` and `1 <= k <= n`.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass_at_k needs 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    return 1 - comb(n - c, k) / comb(n, k)
