"""Selections: how many copies of each candidate continue, given the scores of all."""

from __future__ import annotations

import math
from collections.abc import Sequence


def best(scores: Sequence[float], keep: int, places: int) -> list[int]:
    """Return the number of copies of each candidate if the `keep` best fill all places.

    Each of them continues. The places that are left get a fork each, of the best candidate first, in turn. Equal scores
    rank in order. This is beam search over thoughts; with a `keep` near `places`, it replaces the worst by forks of the
    best (Gambit, arXiv 2608.08020).
    """
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    copies = [0] * len(scores)
    kept = order[:keep]
    for place in range(places if kept else 0):
        copies[kept[place % len(kept)]] += 1
    return copies


def systematic(
    scores: Sequence[float], held: Sequence[int], places: int, temperature: float, offset: float
) -> list[int]:
    """Return the number of copies of each candidate by systematic resampling, as in a particle filter.

    A candidate weighs the softmax of the scores divided by the temperature, as often as it has places, `held`. It gets
    its share of the places, rounded down or up, and on average over `offset` between 0 and 1 exactly its share: one for
    each of the numbers `offset`, `offset + 1`, ... in its part of the cumulated weights (Puri et al., Rollout Roulette,
    2025). Infinite scores are limits: the largest alone have weights.
    """
    weights = _weights(scores, held, temperature)
    total = math.fsum(weights)
    copies = []
    cumulated = 0.0
    taken = 0
    for index, weight in enumerate(weights):
        cumulated += weight / total * places
        end = min(max(math.ceil(cumulated - offset), taken), places)
        if index == len(weights) - 1:
            end = places  # whatever rounding has left
        copies.append(end - taken)
        taken = end
    return copies


def _weights(scores: Sequence[float], held: Sequence[int], temperature: float) -> list[float]:
    """Return the weights of candidates, the largest of which is at least 1."""
    highest = max(scores)
    if math.isinf(highest):
        return [float(count if score == highest else 0) for score, count in zip(scores, held, strict=True)]
    return [count * math.exp((score - highest) / temperature) for score, count in zip(scores, held, strict=True)]
