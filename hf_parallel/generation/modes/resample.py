"""`generation_mode="resample"`: samples from states that were visited before (Hive, section 6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_parallel.generation.modes.shared_prefix import SharedPrefixConfig


@dataclass
class ResampleConfig(SharedPrefixConfig):
    """Samples that follow what was sampled before as long as they agree with it, without running the model.

    What the model computes is remembered in `logits_cache`, which is to be kept from call to call. A sample replays
    remembered logits until it leaves them; then what it replayed is computed once and it goes on as usual. Pass a
    `SharedPrefixCache` as `past_key_values` too, and what is held in it is not computed again.

    Parameters
    ----------
    logits_cache : LogitsCache
        Where logits are remembered.
    replay : str or ReplayPolicy
        `stepwise`: every token is drawn, so the samples' distribution is the model's own. `hotspot`: only uncertain
        tokens are drawn, so more is replayed (`Hotspot` has its settings). Or a policy of your own.
    """

    mode: ClassVar[str] = "resample"
    needs_logits_cache: ClassVar[bool] = True
    example_arguments: ClassVar[Mapping[str, str]] = {"logits_cache": "hf_parallel.LogitsCache()"}

    def run(self, call: Any) -> Any:
        """As `shared_prefix`, over a LogitsCache."""
        if self.logits_cache is None:
            raise ValueError("generation_mode='resample' needs logits_cache=hf_parallel.LogitsCache(), kept by you")
        return super().run(call)
