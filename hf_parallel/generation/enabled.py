"""State that `enable` keeps on a model: its capabilities, who uses it, and the defaults of its calls."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_parallel.cache.images import ImageTable
from hf_parallel.generation.prepared_settings import PreparedSettings
from hf_parallel.models.probing.capabilities import Capabilities

BUSY = (
    "this model is already generating in parallel: generate was called again from a processor, a streamer or another "
    "thread; submit concurrent calls to an Engine, or let threads take turns with a lock"
)
"""Error of a thread that finds the model in use."""
ENGINE_OPEN = "an open Engine holds this model: submit requests to it, or close it first"
"""The same where an engine uses it."""


class Claim:
    """Hold of a thread on a model for one call of a mode, or of an engine.

    Calls that find the model in use raise `busy`.
    `active = False` in a `finally` releases it: a single store, before which no Ctrl-C can be raised, unlike before a
    function or a context manager of Python.
    """

    def __init__(self, busy: str = BUSY) -> None:
        self.busy = busy
        self.process = os.getpid()
        self.active = False

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copy of the model is free


class Preparation(threading.local):
    """The calls that a thread lets transformers prepare: the model, config and claim of each.

    The last one is the innermost: a streamer that receives the prompt of a call may prepare another one.
    """

    calls: tuple[tuple[Any, Any, Claim], ...] = ()


preparation = Preparation()


@dataclass(eq=False)
class Enabled:
    """State of an enabled model. Copies of the model share its tokenizer; a pickle does not hold it."""

    capabilities: Capabilities
    tokenizer: PreTrainedTokenizerBase | None = None  # of calls without one
    claim: Claim | None = None
    attention_before: dict[str, str] | None = None  # implementations that `training.prepare_model` has replaced
    images: ImageTable = field(default_factory=ImageTable)  # in use, whose features need not be computed again
    prepared: PreparedSettings = field(default_factory=PreparedSettings)  # of the last calls

    def __deepcopy__(self, memo: object) -> Enabled:
        return replace(self, claim=None, images=ImageTable(), prepared=PreparedSettings())

    def __reduce__(self) -> tuple[type[Enabled], tuple[Capabilities]]:
        return Enabled, (self.capabilities,)


def enabled(model: PreTrainedModel) -> Enabled:
    """Return the state of an enabled model."""
    return model._parallel  # type: ignore[return-value] # an attribute of the subclass that `enable` makes
