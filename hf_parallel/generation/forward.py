"""One forward pass of the model over packed tokens."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from typing import Any

import torch

from hf_parallel.cache import BlockCache, ForwardPass, Segment
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.stats import GenerationStats
from hf_parallel.kernels import to_device
from hf_parallel.models.cuda_graph import DecodeGraphs


class ForwardPasses:
    """Runs the model of a call over a block cache.

    Parameters
    ----------
    call : GenerationCall
    cache : BlockCache
    stats : GenerationStats
        Where to count.
    """

    def __init__(self, call: GenerationCall, cache: BlockCache, stats: GenerationStats) -> None:
        self.call, self.cache, self.stats = call, cache, stats
        self.device = call.input_ids.device
        self._keyword: dict[str, Any] = {"block_cache": cache} if call.capabilities.keyword else {}
        captures = call.cuda_graph and DecodeGraphs.serve(call.model, self.device)
        self.graphs = DecodeGraphs(cache) if captures else None
        self._keeps = "logits_to_keep" in inspect.signature(call.model.forward).parameters

    def forward(
        self, brought: Sequence[tuple[Segment, Sequence[int]]], ends: Sequence[int] | None = None
    ) -> torch.Tensor:
        """One forward pass.

        Parameters
        ----------
        brought : sequence of (Segment, tokens)
        ends : sequence of int, optional
            Segments whose last token's logits are wanted. Default: those of all tokens.

        Returns
        -------
        torch.Tensor
            `[len(ends) or tokens, vocabulary]`.
        """
        return self.run([[segment for segment, _ in brought]], self.packed(brought), ends)

    def packed(self, brought: Sequence[tuple[Segment, Sequence[int]]]) -> torch.Tensor:
        """The tokens of segments, as a pass takes them."""
        return to_device([token for _, tokens in brought for token in tokens], self.device)

    def run(self, passes: Sequence[Sequence[Segment]], ids: torch.Tensor, ends: Sequence[int] | None) -> torch.Tensor:
        """One forward pass over packed tokens `ids`, `int64 [T]` on the device, of one pass or several in a row.

        Returns the logits at `ends`, or of all tokens.
        """
        began = time.perf_counter()
        try:
            run = len(passes) > 1
            forward = self.cache.prepare_run(passes) if run else self.cache.prepare(passes[0])
            keep = None if ends is None or len(ends) == len(ids) else [forward.last_tokens[end] for end in ends]
            self.stats.plan_seconds += time.perf_counter() - began
            logits = self._logits(forward, ids, keep)
        except BaseException:
            self.cache.rollback()
            raise
        self.cache.commit()
        self.stats.forward_passes += 1
        return logits

    def _logits(self, forward: ForwardPass, ids: torch.Tensor, keep: list[int] | None) -> torch.Tensor:
        """Logits of the tokens at `keep` (None: of all)."""
        if self.graphs is not None and keep is None and forward.is_decode_step:
            return self.graphs.logits(self._forward, forward, ids)
        return self._forward(ids, forward.position_ids, None if keep is None else to_device(keep, self.device))

    def _forward(self, ids: torch.Tensor, position_ids: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        """Run the model over packed tokens of the prepared pass, `int64 [T]`."""
        arguments = self._keyword if keep is None or not self._keeps else {**self._keyword, "logits_to_keep": keep}
        output = self.call.model(
            input_ids=ids[None],
            position_ids=position_ids[None],
            past_key_values=self.cache,
            use_cache=True,
            return_dict=True,
            **arguments,
        )
        return output.logits[0] if self._keeps or keep is None else output.logits[0].index_select(0, keep)
