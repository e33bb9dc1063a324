"""Settings of the modes that replay remembered logits (Hive, section 6), checked in one place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hf_parallel.cache.logits import LogitsCache
from hf_parallel.generation.config import ParallelConfig
from hf_parallel.generation.decode import DecodeLoop
from hf_parallel.generation.resampling.policies import make_policy
from hf_parallel.generation.resampling.replay import Replayer


@dataclass
class ReplayConfig(ParallelConfig):
    """What modes have in common that remember the logits of a model.

    Parameters
    ----------
    logits_cache : LogitsCache, optional
        Remembers what the model computes, so that later calls replay it as far as their samples agree, without running
        the model (see `ResampleConfig`).
    replay : str or ReplayPolicy
        Which of the remembered tokens are drawn anew: `stepwise` all of them, `hotspot` the uncertain ones.
    prefetch : bool, optional
        Whether the sampling work of later replays (`top_p` and the like, the uncertainty of hotspots) is done ahead in
        the background while the model decodes. It changes no sample. Default: where the model runs on another device
        than the host.
    """

    not_stored: ClassVar[tuple[str, ...]] = ("logits_cache",)

    logits_cache: Any = None
    replay: Any = "stepwise"
    prefetch: Any = None

    def validate(self) -> None:
        """Check every setting; see `ParallelConfig.validate`."""
        super().validate()
        if self.logits_cache is not None and not isinstance(self.logits_cache, LogitsCache):
            raise ValueError(f"logits_cache must be a LogitsCache, got {type(self.logits_cache).__name__}")
        make_policy(self.replay)
        if self.prefetch is not None and not isinstance(self.prefetch, bool):
            raise ValueError(f"prefetch must be True, False or None, got {self.prefetch!r}")


@contextmanager
def replaying(
    loop: DecodeLoop, config: ReplayConfig, prompts: Sequence[np.ndarray] = (), draft_tokens: int | None = 0
) -> Iterator[None]:
    """Let a decode loop replay and cache logits, if the config has a `logits_cache`.

    Parameters
    ----------
    loop : DecodeLoop
    config : ReplayConfig
    prompts : sequence of int64 arrays
        Prompts of rows 0, 1, ...; rows of groups need none, and nothing is precomputed for them.
    draft_tokens : int, optional
        See `SharedPrefixConfig`.
    """
    if config.logits_cache is None:
        yield
        return
    policy, prefetch = make_policy(config.replay), config.prefetch if len(prompts) else False
    loop.replayer = Replayer(config.logits_cache, policy, loop.call, loop.sampler, loop.stats, prefetch, draft_tokens)
    with loop.replayer.walking(prompts):
        yield
