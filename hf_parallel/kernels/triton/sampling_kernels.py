"""Triton kernels that sample tokens from scores without sorting the vocabulary; `sampling.py` launches them.

Scores are read in the dtype in which they are stored. Each score has an integer key of the same order, so that
thresholds are found exactly, by comparing with 16 keys per pass over a row. The vocabulary is divided into groups of
128 tokens. Their highest scores bound the thresholds from below, and groups below the bound are not read again.
"""

# Arguments without annotation are pointers and scalars: Triton reads annotations itself.
# mypy: ignore-errors

import triton
import triton.language as tl
from triton.language.extra import libdevice

GROUP = tl.constexpr(128)
WAYS = tl.constexpr(16)  # keys that one pass compares with
PARTS = tl.constexpr(4)  # of a chunk: ratio and weight of its winner, highest score, sum of weights
LOWEST = tl.constexpr(-3.4028234663852886e38)
LOWEST_KEY = tl.constexpr(-2139095041)  # of minus infinity
MAX_NOISE = tl.constexpr(23.0)
NO_TOKEN = tl.constexpr((1 << 31) - 1)
BISECTIONS = tl.constexpr(14)
RANGE = tl.constexpr(64.0)  # of scores in which a bound is searched


@triton.jit
def _settings(settings, row, stride):
    """Inverse temperature, top_k (0: off), 1 - top_p (0: off) and min_p (0: off) of a row."""
    settings += row * stride
    return tl.load(settings), tl.load(settings + 1), tl.load(settings + 2), tl.load(settings + 3)


@triton.jit
def _exponential_noise(key, tokens, LIBDEVICE: tl.constexpr):
    """`exponential_noise` of `hf_parallel.generation.sampling.rng`."""
    bits = key.to(tl.uint64, bitcast=True) + tokens.to(tl.uint64) * 0x9E3779B97F4A7C15
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    upper = ((bits ^ (bits >> 31)) >> 32).to(tl.uint32)
    uniform = (upper.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    if LIBDEVICE:  # PyTorch's function
        noise = -libdevice.log1p(-uniform)
    else:
        noise = -tl.log(1.0 - uniform.to(tl.float64)).to(tl.float32)
    return tl.minimum(noise, MAX_NOISE)


@triton.jit
def _race(weight, noise, key, row, tokens, mask, vocabulary, SEEDED: tl.constexpr, LIBDEVICE: tl.constexpr):
    """Ratios of weights and noise, -1 outside of `mask`."""
    if SEEDED:
        noised = _exponential_noise(key, tokens, LIBDEVICE)
    else:
        noised = tl.load(noise + row.to(tl.int64) * vocabulary + tokens, mask=mask, other=1.0)
    return tl.where(mask, tl.div_rn(weight, noised), -1.0)


@triton.jit
def _store(drawn, probs, row, token, prob):
    """Store the token of a row, or the mark of a row without valid probabilities; and the token's probability."""
    is_valid = (prob > 0) & (prob <= 1.001)
    tl.store(drawn + row, tl.where(is_valid, token, 0).to(tl.int64))
    tl.store(drawn + tl.num_programs(0) + row, tl.where(is_valid, 0, 2).to(tl.int64))
    tl.store(probs + row, prob)


@triton.jit
def race_kernel(
    scores, stride, vocabulary, settings, settings_stride, keys, noise, parts, part_tokens,
    PROBS: tl.constexpr, SEEDED: tl.constexpr, LIBDEVICE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Race among the tokens of one chunk, for rows without filters. With `PROBS`, scores are probabilities."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    inverse, top_k, removed, min_p = _settings(settings, row, settings_stride)
    if (top_k <= 0) & (removed <= 0) & (min_p <= 0):
        tokens = chunk * BLOCK + tl.arange(0, BLOCK)
        mask = tokens < vocabulary
        score = tl.load(scores + row.to(tl.int64) * stride + tokens, mask=mask, other=-float("inf")).to(tl.float32)
        if PROBS:
            highest = 0.0
            weight = tl.where(mask, score, 0.0)
        else:
            score = score * inverse
            highest = tl.maximum(tl.max(score, 0), LOWEST)
            weight = tl.exp(score - highest)
        ratio = _race(weight, noise, tl.load(keys + row), row, tokens, mask, vocabulary, SEEDED, LIBDEVICE)
        best = tl.max(ratio, 0)
        winner = tl.min(tl.where(ratio == best, tokens, NO_TOKEN), 0)
        at = row * chunks + chunk
        tl.store(part_tokens + at, winner)
        tl.store(parts + at * PARTS, best)
        tl.store(parts + at * PARTS + 1, tl.sum(tl.where(tokens == winner, weight, 0.0), 0))
        tl.store(parts + at * PARTS + 2, highest)
        tl.store(parts + at * PARTS + 3, tl.sum(weight, 0))


@triton.jit
def winner_kernel(settings, settings_stride, parts, part_tokens, chunks, drawn, out_probs, BLOCK_C: tl.constexpr):
    """Winner among the winners of a row's chunks."""
    row = tl.program_id(0)
    inverse, top_k, removed, min_p = _settings(settings, row, settings_stride)
    if (top_k <= 0) & (removed <= 0) & (min_p <= 0):
        chunk = tl.arange(0, BLOCK_C)
        mask = chunk < chunks
        at = row * chunks + chunk
        token = tl.load(part_tokens + at, mask=mask, other=NO_TOKEN)
        highest = tl.load(parts + at * PARTS + 2, mask=mask, other=LOWEST)
        factor = tl.exp(highest - tl.max(highest, 0))
        ratio = tl.where(mask, tl.load(parts + at * PARTS, mask=mask, other=0.0) * factor, -1.0)
        winner = tl.min(tl.where(ratio == tl.max(ratio, 0), token, NO_TOKEN), 0)
        weight = tl.load(parts + at * PARTS + 1, mask=mask, other=0.0) * factor
        total = tl.sum(tl.load(parts + at * PARTS + 3, mask=mask, other=0.0) * factor, 0)
        prob = tl.sum(tl.where(token == winner, weight, 0.0), 0) / total
        _store(drawn, out_probs, row, winner, prob)


@triton.jit
def group_kernel(
    scores, stride, vocabulary, settings, settings_stride, maxima, sums, num_groups,
    BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Highest score of each group of a chunk, and the sum of the weights relative to it, for rows with filters."""
    row = tl.program_id(0)
    inverse, top_k, removed, min_p = _settings(settings, row, settings_stride)
    if (top_k > 0) | (removed > 0) | (min_p > 0):
        group = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
        tokens = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        at = scores + row.to(tl.int64) * stride + tokens
        score = tl.load(at, mask=tokens < vocabulary, other=-float("inf")).to(tl.float32)
        highest = tl.max(score, 1)
        relative = score * inverse - tl.maximum(highest * inverse, LOWEST)[:, None]  # LOWEST * inverse may overflow
        mask = group < num_groups
        tl.store(maxima + row * num_groups + group, highest, mask=mask)
        tl.store(sums + row * num_groups + group, tl.sum(tl.exp(relative), 1), mask=mask)


@triton.jit
def _key_of(score, SHIFT: tl.constexpr):
    """Integer of the same order as a score, without the `SHIFT` bits that its dtype does not have."""
    score = tl.where(score == 0, 0.0, score)  # zeros of both signs are equal
    bits = score.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _score_of(key, SHIFT: tl.constexpr):
    """Inverse of `_key_of`; the missing bits are zero."""
    bits = key << SHIFT
    flipped = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if SHIFT > 0:
        flipped = (flipped >> SHIFT) << SHIFT
    return flipped.to(tl.float32, bitcast=True)


@triton.jit
def _tile(scores, groups, start, num_active, vocabulary, BLOCK: tl.constexpr):
    """Tokens and scores of a tile of the active groups; -inf outside of them."""
    lane = tl.arange(0, BLOCK)
    slot = start // GROUP + lane // GROUP
    group = tl.load(groups + slot, mask=slot < num_active, other=0)
    tokens = group * GROUP + lane % GROUP
    mask = (slot < num_active) & (tokens < vocabulary)
    score = tl.load(scores + tokens, mask=mask, other=-float("inf")).to(tl.float32)
    return tokens, score, mask


@triton.jit
def _search(
    scores, groups, num_active, vocabulary, low, high, least, inverse, highest, base, limit,
    WEIGHTED: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Highest key in `[low, high)` with at most a limit below it.

    Counts tokens of the active groups, or sums the weights of those whose keys are at least `least`, to which `base`
    is added. The limit is given: the number of tokens to be kept, or the fraction of the sum that is removed.
    Returns the key, what is below it, what is below the following key, and the whole sum.

    `BLOCK` is the number of threads. With one token each, no thread needs another's keys and weights: loops over tokens
    have no barriers, and programs use so few registers that several run on a processor.
    """
    ways = tl.arange(0, WAYS)
    below_low = base
    below_high = base
    total = base
    passes = 0
    while (high - low > 1) | (passes == 0):
        if passes == 0:  # equal distances of scores, not of keys, most of which belong to scores near zero
            bottom = tl.maximum(_score_of(low.to(tl.int32), SHIFT), LOWEST)
            top = _score_of((high - 1).to(tl.int32), SHIFT)
            key = _key_of(bottom + (top - bottom) * ((ways + 1).to(tl.float32) / WAYS), SHIFT).to(tl.int64)
            bounds = tl.where(ways == WAYS - 1, high, tl.minimum(tl.maximum(key, low), high - 1))
        else:
            bounds = tl.minimum(low + (ways + 1) * ((high - low + WAYS - 1) // WAYS), high)
        compared = bounds.to(tl.int32)[:, None]
        below = tl.zeros((WAYS, BLOCK), dtype=tl.float32)
        for start in range(0, num_active * GROUP, BLOCK):
            tokens, score, mask = _tile(scores, groups, start, num_active, vocabulary, BLOCK)
            key = _key_of(score, SHIFT)
            if WEIGHTED:
                weight = tl.where(mask & (key >= least), tl.exp(score * inverse - highest), 0.0)
            else:
                weight = mask.to(tl.float32)
            below += tl.where(key[None, :] < compared, weight[None, :], 0.0)
        sums = base + tl.sum(below, 1)
        if passes == 0:  # the last bound is above all keys
            total = tl.max(sums, 0)
            if WEIGHTED:
                limit = limit * total
            else:
                limit = total - limit
        is_low = (sums <= limit) & (bounds < high)
        below_high = tl.min(tl.where(is_low, float("inf"), sums), 0)
        below_low = tl.maximum(below_low, tl.max(tl.where(is_low, sums, base), 0))
        following = tl.min(tl.where(is_low, high, bounds), 0)
        low = tl.maximum(low, tl.max(tl.where(is_low, bounds, low), 0))
        high = following
        passes += 1
    return low, below_low, below_high, total


@triton.jit
def _bound(maxima, mass, top_k, removed, min_p, highest):
    """Score below which no token is kept, by the highest scores of groups and the sums of their weights."""
    total = tl.sum(mass, 0)
    lowest = tl.min(tl.where(maxima > LOWEST, maxima, highest), 0)
    low = tl.where(top_k > 0, lowest, highest - RANGE)
    high = highest
    bound = -float("inf")
    for i in range(BISECTIONS + 1):
        middle = tl.where(i == 0, low, (low + high) * 0.5)
        above = maxima >= middle
        count = tl.sum(above.to(tl.float32), 0)
        below = tl.sum(tl.where(above, 0.0, mass), 0) + GROUP * count * tl.exp(middle - highest)
        is_bound = tl.where(top_k > 0, count >= top_k, (removed > 0) & (below <= 0.9999 * removed * total))
        bound = tl.where(is_bound, tl.maximum(bound, middle), bound)
        low = tl.where(is_bound, middle, low)
        high = tl.where(is_bound, high, middle)
    if (top_k <= 0) & (removed <= 0):  # min_p is applied last: other filters need the tokens that it removes
        bound = highest + tl.log(min_p) - 1e-3
    return bound


@triton.jit
def choose_kernel(
    scores, stride, vocabulary, settings, settings_stride, keys, noise, maxima, sums, groups, num_groups, drawn,
    out_probs,
    SHIFT: tl.constexpr, SEEDED: tl.constexpr, LIBDEVICE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK: tl.constexpr,
    RACED: tl.constexpr,
):  # fmt: skip
    """Find the tokens that a row's filters keep, and race among them."""
    row = tl.program_id(0)
    inverse, top_k, removed, min_p = _settings(settings, row, settings_stride)
    if (top_k > 0) | (removed > 0) | (min_p > 0):
        scores += row.to(tl.int64) * stride
        groups += row * num_groups
        group = tl.arange(0, BLOCK_G)
        own = group < num_groups
        maximum = tl.load(maxima + row * num_groups + group, mask=own, other=-float("inf"))
        best_score = tl.max(maximum, 0)
        highest = best_score * inverse
        scaled = maximum * inverse
        mass = tl.load(sums + row * num_groups + group, mask=own, other=0.0) * tl.exp(scaled - highest)
        total = tl.sum(tl.where(own, mass, 0.0), 0)
        token = 0
        prob = float("nan")
        if (total > 0) & (total < float("inf")):
            bound = _bound(scaled, mass, top_k, removed, min_p, highest)
            active = own & (scaled >= bound)
            tl.store(groups + tl.cumsum(active.to(tl.int32), 0) - 1, group, mask=active)
            num_active = tl.sum(active.to(tl.int32), 0)
            inactive = tl.sum(tl.where(active, 0.0, mass), 0)
            tl.debug_barrier()
            high = _key_of(best_score, SHIFT).to(tl.int64) + 1
            # Scores are rounded when they are scaled: a few keys below the bound may belong to it.
            low = tl.maximum(_key_of(bound / inverse, SHIFT), (LOWEST_KEY >> SHIFT) + 4).to(tl.int64) - 4
            least = low
            if top_k > 0:
                least, _, _, _ = _search(
                    scores, groups, num_active, vocabulary, low, high, 0, inverse, highest, 0.0, top_k,
                    WEIGHTED=False, SHIFT=SHIFT, BLOCK=BLOCK,
                )  # fmt: skip
                low = least
                inactive = 0.0
            first_ties = 0.0  # tokens with the lowest kept score that are removed
            if removed > 0:
                counted = tl.where(top_k > 0, least, LOWEST_KEY >> SHIFT).to(tl.int32)
                least, below, below_next, whole = _search(
                    scores, groups, num_active, vocabulary, low, high, counted, inverse, highest, inactive, removed,
                    WEIGHTED=True, SHIFT=SHIFT, BLOCK=BLOCK,
                )  # fmt: skip
                weight = tl.exp(_score_of(least.to(tl.int32), SHIFT) * inverse - highest)
                ties = tl.floor((below_next - below) / weight + 0.5)
                first_ties = tl.maximum(tl.minimum(tl.floor((removed * whole - below) / weight), ties - 1), 0.0)
            kept_key = least.to(tl.int32)
            key_of_row = tl.load(keys + row)
            ratios = tl.full((RACED,), -1.0, tl.float32)
            winners = tl.zeros((RACED,), tl.int32)
            weights = tl.zeros((RACED,), tl.float32)
            sum_kept = tl.zeros((RACED,), tl.float32)
            seen = 0
            for start in range(0, num_active * GROUP, RACED):
                tokens, score, mask = _tile(scores, groups, start, num_active, vocabulary, RACED)
                key = _key_of(score, SHIFT)
                weight = tl.exp(score * inverse - highest)
                kept = mask & (key >= kept_key) & (weight >= min_p)
                if first_ties > 0:
                    tie = (mask & (key == kept_key)).to(tl.int32)
                    kept = kept & ((tie == 0) | ((seen + tl.cumsum(tie, 0) - tie).to(tl.float32) >= first_ties))
                    seen += tl.sum(tie, 0)
                if tl.max(kept.to(tl.int32), 0) > 0:
                    ratio = _race(weight, noise, key_of_row, row, tokens, kept, vocabulary, SEEDED, LIBDEVICE)
                    is_better = ratio > ratios
                    ratios = tl.where(is_better, ratio, ratios)
                    winners = tl.where(is_better, tokens, winners)
                    weights = tl.where(is_better, weight, weights)
                    sum_kept += tl.where(kept, weight, 0.0)
            token = tl.min(tl.where(ratios == tl.max(ratios, 0), winners, NO_TOKEN), 0)
            prob = tl.sum(tl.where(winners == token, weights, 0.0), 0) / tl.sum(sum_kept, 0)
        _store(drawn, out_probs, row, token, prob)
