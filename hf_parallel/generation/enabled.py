"""State that `enable` keeps on a model: its capabilities, who uses it, and the defaults of its calls."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_parallel.cache.images import ImageTable
from hf_parallel.generation.claim import Claim
from hf_parallel.models.capabilities import Capabilities


@dataclass(eq=False)
class Enabled:
    """State of an enabled model. Copies of the model share its tokenizer; a pickle does not hold it."""

    capabilities: Capabilities
    wait: float = 0.0  # seconds for which a call waits while another thread uses the model
    tokenizer: PreTrainedTokenizerBase | None = None  # of calls without one
    claim: Claim | None = None
    images: ImageTable = field(default_factory=ImageTable)  # in use, whose features need not be computed again

    def __deepcopy__(self, memo: object) -> Enabled:
        return replace(self, claim=None, images=ImageTable())

    def __reduce__(self) -> tuple[type[Enabled], tuple[Capabilities, float]]:
        return Enabled, (self.capabilities, self.wait)


def enabled(model: PreTrainedModel) -> Enabled:
    """Return the state of an enabled model."""
    return model._parallel  # type: ignore[return-value] # an attribute of the subclass that `enable` makes
