"""Settings of Dynamo while decoder layers are compiled for decode steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._dynamo import config as dynamo_config

_LAYER_INDEX = r".*layer_idx.*"
"""Source of the only number of a module that is dynamic: others, such as sizes of heads, are constants of a graph."""


@contextmanager
def one_graph_for_all_layers(most_graphs: int) -> Iterator[None]:
    """Let Dynamo compile up to so many graphs of one function, none of which depends on the index of a layer."""
    with (
        dynamo_config.patch(allow_unspec_int_on_nn_module=True, recompile_limit=most_graphs),
        torch.compiler.config.patch(dynamic_sources=_LAYER_INDEX),  # type: ignore[attr-defined]
    ):
        yield
