"""Beam search in `shared_prefix`: `num_beams` sequences of each prompt, of which the best ones go on.

The prompts are computed once. Beams that share a past share its blocks; beams that are equal are computed once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_parallel.cache.beam_tree import BeamBranch, BeamTree
from hf_parallel.cache.tree import Node
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.config import Generated
from hf_parallel.generation.decoding.beam_ranking import BeamRanking, RankedBeams
from hf_parallel.generation.decoding.loop import DecodeLoop
from hf_parallel.generation.decoding.prefill import insert_prompt, prefill_leaves, prefix_cache_of
from hf_parallel.generation.decoding.rows import Row
from hf_parallel.generation.decoding.wants import Steps
from hf_parallel.generation.outputs import ALWAYS, ParallelOutput
from hf_parallel.generation.sampling.log_probs import LogProbs
from hf_parallel.generation.sampling.rng import Seed, make_rngs
from hf_parallel.generation.sampling.token_table import TokenTable
from hf_parallel.kernels import to_device
from hf_parallel.models.probing.signature import CACHE


@dataclass
class BeamSearchOutput(ParallelOutput):
    """Output of `shared_prefix` with `num_beams`, as `GenerateBeamDecoderOnlyOutput` of Transformers.

    `scores` and `logits` are `[beams, vocabulary]` at each step, of all beams of all prompts.

    Attributes
    ----------
    sequences_scores : float32 [rows], optional
        Final score of each sequence, with `output_scores`.
    beam_indices : int32 [rows, new tokens]
        Index of the beam that each new token continued, as `compute_transition_scores` reads it; -1 after the end.
    """

    sequences_scores: torch.Tensor | None = None
    beam_indices: torch.Tensor = ALWAYS

    @classmethod
    def _own_fields(cls) -> list[str]:
        return []  # its tensors are no data of single answers


class BeamSearchRun:
    """One call with `num_beams`. `seed`: as in `ParallelConfig`, but one of each prompt, whose beams draw together."""

    def __init__(self, call: GenerationCall, seed: Seed) -> None:
        self.call = call
        self.cache = prefix_cache_of(call)
        self.num_beams: int = call.generation_config.num_beams
        self.ranking = BeamRanking(call, make_rngs(seed, call.num_rows // self.num_beams))
        self.tree = BeamTree(self.cache.pool)
        self.loop = DecodeLoop(call, self.cache, TokenTable(call.input_ids, call.pad_token_id, capacity=1))

    def generate(self) -> Steps[Generated]:
        """Generate. Return a tensor `int64 [rows, length]` or a `BeamSearchOutput`."""
        call = self.call
        with self.loop.running():
            leaves: list[Node] = []
            for row in range(0, call.num_rows, self.num_beams):
                leaves.append((yield from insert_prompt(self.cache, call.prompts[row], call.gaps[row])))
            logits = yield from prefill_leaves(self.loop, self.cache, leaves)
            yield from self._search(leaves, logits)
        if call.past_key_values is None and not call.host.is_shared:
            self.cache.end_call()  # frees the blocks of the beams
        return self._output(self.ranking.result())

    def _search(self, leaves: Sequence[Node], logits: torch.Tensor) -> Steps[None]:
        """Search until the ranking has ended, given the last node of each prompt, and logits `[prompts, vocabulary]`.

        Rows are the different ones among the beams: `branches` and `places` say for each beam where it ends, and which
        row it is.
        """
        began = time.perf_counter()
        call = self.call
        prompts = {leaf: BeamBranch(leaf.view, leaf.next_position) for leaf in leaves}
        branches = [prompts[leaf] for leaf in leaves for _ in range(self.num_beams)]
        places = [number for number in range(len(leaves)) for _ in range(self.num_beams)]
        while True:
            self.ranking.rank(logits[to_device(places, logits.device)])
            call.record.passes += 1
            self.loop.stats.decoded_tokens += len(branches)
            call.host.count_tokens(len(branches))
            if self.ranking.is_done:
                break
            numbers: dict[tuple[BeamBranch, int], int] = {}
            places = []
            for parent, token in zip(*self.ranking.beams(), strict=True):
                places.append(numbers.setdefault((branches[parent], token), len(numbers)))
            continued = self.tree.advance([branch for branch, _ in numbers])
            rows = []
            for branch, (_, token), index in zip(continued, numbers, range(len(numbers)), strict=True):
                rows.append(Row(index, branch.view, [token]))
            branches = [continued[place] for place in places]
            logits = yield from self.loop.step(rows)
        self.loop.stats.decode_seconds += time.perf_counter() - began

    def _output(self, ranked: RankedBeams) -> Generated:
        """Record the returned rows, and return the output of `generate`."""
        call = self.call
        record = call.record
        per_prompt = call.generation_config.num_return_sequences or 1
        of_prompts = [row - row % self.num_beams for row in range(call.num_rows) if row % self.num_beams < per_prompt]
        record.prompts = [record.prompts[row] for row in of_prompts]
        record.images = [record.images[row] for row in of_prompts] if record.images else record.images
        begin = call.input_ids.shape[1]
        record.lengths = [begin + count for count in ranked.num_new]
        rows: list[int] = []
        tokens: list[int] = []
        for row, (sequence, length) in enumerate(zip(ranked.sequences.tolist(), record.lengths, strict=True)):
            new_tokens = sequence[begin:length]
            tokens += new_tokens
            rows += [row] * len(new_tokens)
            if length >= call.max_length and sequence[-1] not in call.eos_token_ids:
                record.truncated.add(row)
        call.host.show_tokens(rows, tokens)
        config = call.generation_config
        if not config.return_dict_in_generate:
            if call.past_key_values is None:
                self.cache.reset()
            return ranked.sequences
        is_token = ranked.beam_indices >= 0
        values = ranked.log_probs[is_token]
        record.log_probs.append((rows, LogProbs(values, torch.full_like(values, torch.nan))))
        if call.past_key_values is None:
            self.cache.record_weights(call.model, call.fingerprint)
        scores = self.ranking.scores
        logits = self.ranking.logits
        cache = None if call.host.is_shared else self.cache  # the storage of an engine is its own
        return BeamSearchOutput(
            sequences=ranked.sequences,  # type: ignore[arg-type]
            scores=None if scores is None else tuple(scores),  # type: ignore[arg-type]
            logits=None if logits is None else tuple(logits),  # type: ignore[arg-type]
            sequences_scores=ranked.scores if config.output_scores else None,
            beam_indices=ranked.beam_indices,
            log_probs=ranked.log_probs,
            stats=self.loop.stats,
            record=record,
            **{CACHE: cache},  # type: ignore[arg-type]
        )
