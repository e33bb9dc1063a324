"""ReplayConfig: settings of the modes that replay cached logits (Hive, section 6)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from hf_parallel.cache.logits import LogitsCache
from hf_parallel.cache.logits_key import LogitsKey
from hf_parallel.generation.call import has_dropout
from hf_parallel.generation.config import OutputT, ParallelConfig
from hf_parallel.generation.decoding.loop import DecodeLoop
from hf_parallel.generation.decoding.replay.policies import ReplayPolicy, make_policy
from hf_parallel.generation.decoding.replay.replay import Replayer
from hf_parallel.generation.decoding.replay.speculative import SpeculativeDecoder
from hf_parallel.generation.settings import NOT_STORED


@dataclass
class ReplayConfig(ParallelConfig[OutputT]):
    """Settings of modes that cache logits.

    Parameters
    ----------
    logits_cache : LogitsCache, optional
        Stores the logits that the model computes. Later calls replay them without running the model, as long as their
        samples agree (see `ResampleConfig`).
    replay : str or ReplayPolicy
        Which replayed tokens are sampled again: `stepwise` all of them, `hotspot` the uncertain ones.
    prefetch : bool, optional
        Whether a background thread computes the sampling distributions of later replays (`top_p` and the like) and the
        uncertainty that finds hotspots while the model decodes. Samples do not change. Default: True unless the model
        is on the CPU.
    """

    logits_cache: LogitsCache | None = field(default=None, metadata=NOT_STORED)
    replay: str | ReplayPolicy = "stepwise"
    prefetch: bool | None = None

    def validate(self) -> None:
        super().validate()
        if self.logits_cache is not None and not isinstance(self.logits_cache, LogitsCache):
            raise ValueError(f"logits_cache must be a LogitsCache, got {type(self.logits_cache).__name__}")
        make_policy(self.replay)
        if self.prefetch is not None and not isinstance(self.prefetch, bool):
            raise ValueError(f"prefetch must be True, False or None, got {self.prefetch!r}")


@contextmanager
def replaying(
    loop: DecodeLoop, config: ReplayConfig, prompts: Sequence[LogitsKey] = (), draft_tokens: int | None = 0
) -> Iterator[None]:
    """Let a decode loop replay and cache logits, if the config has a `logits_cache`.

    `prompts` are those of rows 0, 1, ... (`GenerationCall.logits_keys`). Rows of groups need none: nothing is
    prefetched for them.
    """
    if config.logits_cache is None or has_dropout(loop.call.model, "logits_cache"):
        yield
        return
    policy = make_policy(config.replay)
    prefetch = config.prefetch if len(prompts) else False
    loop.replayer = replayer = Replayer(loop.call, loop.sampler, config.logits_cache, policy, prefetch)
    with replayer.tracking(prompts):
        decoder = SpeculativeDecoder(loop, replayer, draft_tokens)
        if decoder.start():
            loop.draft = decoder.step
        yield
