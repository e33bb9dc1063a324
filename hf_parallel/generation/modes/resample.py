"""`generation_mode="resample"`: samples that replay cached logits (Hive, section 6)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from hf_parallel.generation.modes.shared_prefix import SharedPrefixConfig
from hf_parallel.generation.settings import Arguments


@dataclass
class ResampleConfig(SharedPrefixConfig):
    """Samples that skip the model as long as they agree with earlier ones.

    The logits that the model computes are kept in `logits_cache`, which the caller keeps from call to call. A sample
    replays cached logits until it leaves the cached contexts; then its tokens are prefilled and decoding continues.
    With a `SharedPrefixCache` as `past_key_values`, tokens whose keys it holds are not recomputed.

    Parameters
    ----------
    logits_cache : LogitsCache
        Cached logits of this and earlier calls.
    replay : str or ReplayPolicy
        `stepwise`: samples every token, so that the distribution of samples is the model's own. `hotspot`: samples
        uncertain tokens only, so that more tokens are replayed (see `Hotspot` for its settings). Or a policy object.
    """

    mode: ClassVar[str] = "resample"
    traits = dataclasses.replace(
        SharedPrefixConfig.traits,
        needs_logits_cache=True,
        searches_beams=False,  # a beam search replays no logits
        example_arguments={"logits_cache": "hf_parallel.LogitsCache()"},
    )

    def prepare(self, kwargs: Arguments) -> None:
        if self.logits_cache is None:
            raise ValueError("resample needs a logits_cache: pass one hf_parallel.LogitsCache() to all calls")
        super().prepare(kwargs)
