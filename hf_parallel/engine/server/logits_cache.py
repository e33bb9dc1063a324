"""The server's `LogitsCache` (Hive, section 6): its file, who may read what, and its metrics.

All requests with the field `replay` share one cache, whose budget bounds their memory together. API keys and
`cache_salt` separate its sequences: see `LogitsCache.root_key`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hf_parallel.cache.logits import LogitsCache
from hf_parallel.engine.server.errors import APIError
from hf_parallel.generation.config import ParallelConfig

FIELD = "replay"
"""Field of a request that replays and stores logits."""
_PRIVATE = 0o077
"""Mask of the permissions of a new file: its owner alone reads which tokens clients have sent and received."""


def open_cache(max_bytes: int, path: Path | None = None) -> LogitsCache:
    """Return the cache of a file, or an empty one if there is no file yet.

    Raises `ValueError` that names the file if it is damaged or no file of `LogitsCache.save`, and `OSError` if it
    cannot be read.
    """
    if path is None or not path.exists():
        return LogitsCache(max_bytes)
    return LogitsCache.load(path, max_bytes)


def save_cache(cache: LogitsCache, path: Path) -> None:
    """Write the cache to its file, atomically. Raises `OSError` if that fails; an earlier file stays then."""
    mask = os.umask(_PRIVATE)
    try:
        cache.save(path)
    finally:
        os.umask(mask)


def settings_for(
    mode: type[ParallelConfig], given: dict[str, object], cache: LogitsCache | None
) -> dict[str, LogitsCache]:
    """Return the setting that lets a request use the cache, if it wants that: by its mode or by the field `replay`.

    Raises `APIError` if the server has no cache.
    """
    needs_cache = mode.traits.needs_logits_cache
    if not needs_cache and FIELD not in given:
        return {}
    if cache is None:
        name = "generation_mode" if needs_cache else FIELD
        value = mode.mode if needs_cache else given[FIELD]
        message = f"{name}={value!r} needs cached logits: start the server with --logits-cache, such as 2G"
        raise APIError(400, message, name)
    return {"logits_cache": cache}


def collect(cache: LogitsCache) -> Iterator[Metric]:
    """Yield the metrics of the cache."""
    words = "Lookups of cached logits that found them: tokens that needed no forward pass"
    yield CounterMetricFamily("hf_parallel_logits_cache_hits", words, cache.hits)
    yield CounterMetricFamily("hf_parallel_logits_cache_misses", "Lookups that did not find them", cache.misses)
    yield GaugeMetricFamily("hf_parallel_logits_cache_bytes", "Bytes of cached logits", cache.num_bytes)
    yield GaugeMetricFamily("hf_parallel_max_logits_cache_bytes", "Budget of cached logits", cache.max_bytes)
