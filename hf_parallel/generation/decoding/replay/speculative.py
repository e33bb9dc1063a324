"""SpeculativeDecoder: verifies draft tokens in one forward pass (speculative decoding).

Each token is sampled from the model's logits with the same random noise as without drafts. A draft token is accepted
if it equals the sampled token, so samples do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hf_parallel.cache import Segment
from hf_parallel.cache.placement import execution_device
from hf_parallel.generation.decoding.loop import DecodeLoop
from hf_parallel.generation.decoding.replay.distributions import HOST
from hf_parallel.generation.decoding.replay.drafts import MAX_DRAFT_TOKENS, NgramDrafter
from hf_parallel.generation.decoding.replay.replay import Replayer
from hf_parallel.generation.decoding.rows import PassInputs, Row
from hf_parallel.generation.decoding.wants import Steps
from hf_parallel.kernels import to_device
from hf_parallel.models.cpu.linear import linear_backend

R = TypeVar("R", bound=Row)


class SpeculativeDecoder:
    """Appends several tokens per forward pass. The default of `max_tokens`, per draft, is 15 on the CPU, else 0."""

    def __init__(self, loop: DecodeLoop, replayer: Replayer, max_tokens: int | None = None) -> None:
        self.loop = loop
        self.replayer = replayer
        self._on_cpu = execution_device(loop.call.model).type in HOST
        if max_tokens is None:
            max_tokens = MAX_DRAFT_TOKENS if self._on_cpu else 0
        self.max_tokens = max_tokens

    def start(self) -> bool:
        """Prepare drafts. The prompts are indexed for n-gram lookup once rows decode, as a replay needs no drafts.

        Return False if drafts are disabled, would change what is sampled, or layers keep states, which do not go back.
        """
        loop = self.loop
        replayer = self.replayer
        if not (self.max_tokens and loop.sampler.is_order_independent) or loop.call.capabilities.mixers:
            return False
        eos = frozenset(loop.call.eos_token_ids)
        # GPU costs were not measured; a GPU pass is bound by loading weights, like one with the native CPU kernels.
        backend = linear_backend(loop.call.model) if self._on_cpu else "native"
        self._drafter = NgramDrafter(replayer.cache, self.max_tokens, eos, backend)
        self._unindexed = list(replayer.prompts)
        return True

    def step(self, rows: Sequence[R]) -> Steps[list[R]]:
        """Verify drafts until no row has one. Return the active rows, with their pending tokens."""
        active = list(rows)
        while self._unindexed and active:
            self._drafter.add_prompt(self._unindexed.pop(0))
        node_of = self.replayer.cursors.node
        host = self.loop.call.host
        for row in active:
            self._drafter.observe(row.index, node_of(row.index))
        while active:
            nodes = [node_of(row.index) for row in active]
            num_rows = max(len(active), host.batch_rows)
            drafts = [
                self._drafter.draft(row.index, node, num_rows, self.loop.num_tokens_left(row) - 1)
                for row, node in zip(active, nodes, strict=True)
            ]
            for node in nodes:
                self._drafter.add(node)
            if not any(drafts):
                break
            active = yield from self._verify(active, drafts)
        return active

    def _verify(self, rows: Sequence[R], drafts: Sequence[list[int]]) -> Steps[list[R]]:
        """Run one pass over pending and draft tokens, then sample until the first token that was not drafted."""
        stats = self.loop.stats
        drafter = self._drafter
        lengths = [row.view[-1].length + len(row.pending) for row in rows]
        inputs: PassInputs = []
        firsts = []  # logits that follow the pending tokens
        begin = 0
        for row, draft in zip(rows, drafts, strict=True):
            tokens = [*row.pending, *draft]
            firsts.append(begin + len(row.pending) - 1)
            inputs.append((Segment(row.view, len(tokens)), tokens))
            begin += len(tokens)
        logits = yield from self.loop.runner.forward(inputs)
        verifying = list(range(len(rows)))
        active = []
        step = 0
        while verifying:
            positions = to_device([firsts[i] + step for i in verifying], logits.device)
            sampling = [rows[i] for i in verifying]
            indices = [row.index for row in sampling]
            step_logits = logits.index_select(0, positions)
            tokens, ended, log_probs = self.replayer.sample(indices, step_logits, step > 0)
            continuing = set(self.loop.append(sampling, tokens, ended, is_pass=step == 0, log_probs=log_probs))
            accepted = []
            for i, token in zip(verifying, tokens, strict=True):
                row = rows[i]
                node = self.replayer.cursors.node(rows[i].index)
                drafter.observe(row.index, node)
                if row in continuing and drafts[i][step : step + 1] == [token]:
                    drafter.add(node)
                    accepted.append(i)
                    continue
                self.loop.cache.pool.truncate(row.view[-1], lengths[i] + step)
                stats.drafted_tokens += len(drafts[i])
                stats.accepted_tokens += step
                if row in continuing:
                    active.append(i)
            verifying = accepted
            step = step + 1
        return [rows[i] for i in sorted(active)]
