"""Logits processors of a call, adapted to rows that are workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import (
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
)

from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.modes.hogwild.worker import Worker
from hf_parallel.generation.processors import MinLengthProcessor, PerPromptProcessor

_LENGTH_PROCESSORS = (
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
)
"""Processors of transformers that read nothing of a row but its length."""


class _PassCountingProcessor(LogitsProcessor):
    """Shows a processor rows as long as the prompt and the generated tokens, without headers and step prefixes."""

    keeps_rows = False

    def __init__(self, processor: LogitsProcessor, prompt_length: int, workers: Sequence[Worker]) -> None:
        self.processor, self.prompt_length, self.workers = processor, prompt_length, workers

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores `[rows, vocabulary]`."""
        length = self.prompt_length + max(worker.passes for worker in self.workers)  # those still active have most
        return self.processor(input_ids[:, :1].expand(-1, length), scores)


def adapt_processors(call: GenerationCall, workers: Sequence[Worker]) -> GenerationCall:
    """Return a call whose length limits count decode passes, and whose `prefix_allowed_tokens_fn` gets prompt indices.

    `workers` is read at each pass, as workers may join.
    """
    length, processors = call.input_ids.shape[1], LogitsProcessorList()
    for processor in call.logits_processor:
        if isinstance(processor, _LENGTH_PROCESSORS):
            processor = _PassCountingProcessor(MinLengthProcessor.convert(processor), length, workers)
        elif isinstance(processor, PrefixConstrainedLogitsProcessor):
            processor = PerPromptProcessor(processor, call.num_rows)
        processors.append(processor)
    return replace(call, logits_processor=processors)
