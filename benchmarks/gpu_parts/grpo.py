"""A step of GRPO on a model with random weights: rollouts and loss over a shared prompt, beside TRL's."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

import tokenizers
from tokenizers import decoders, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .cases import Bench, Case, Figures, Target
from .models import draw_prompt
from .timing import PeakMemory


@dataclass(frozen=True)
class GRPOStage:
    """The second step of each way: the first one compiles, and allocates the optimizer's states.

    `rows`: of a micro-batch of full rows. The tree of all completions is one.
    """

    share: ClassVar[float] = 0.1

    model: str = "Qwen3-1.7B"
    prompt: int = 1024
    completions: int = 16
    new_tokens: int = 256
    rows: int = 4

    def cases(self, bench: Bench) -> Iterator[Case]:
        """Yield both ways."""
        for way in ("both_shared", "stock"):
            yield Case({"model": self.model, "way": way}, partial(self._measure, bench, way))

    def targets(self) -> list[Target]:
        """See `Stage.targets`."""

        def speed(cases: list[Figures]) -> list[float | None]:
            ours, stock = (
                next((case.get("step_seconds") for case in cases if case["way"] == way), None)
                for way in ("both_shared", "stock")
            )
            return [stock / ours if ours and stock else None]

        return [Target(f"a step of GRPO, {self.model}: speed relative to TRL's", speed, 1.0, at_least=True)]

    def _measure(self, bench: Bench, way: str) -> Figures:
        try:
            from benchmarks.training import grpo_step
        except ImportError as error:  # an optional package
            return {"not_measured": f"trl: {error}"}
        bench.deadline.check()
        model = bench.models.new(self.model)
        ids = draw_prompt(model, 1, self.prompt).cpu() % 94  # printable ASCII, whose text has as many tokens
        memory = PeakMemory(model.device)
        seconds = grpo_step(model, byte_tokenizer(), ids, Namespace(**asdict(self)), way, steps=2)
        return {"step_seconds": seconds} | memory.figures()


def byte_tokenizer() -> Any:
    """Return a tokenizer of transformers with a token per byte; other tokens decode to nothing."""
    alphabet = {letter: token for token, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    whole = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=alphabet, merges=[]))
    whole.pre_tokenizer, whole.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    whole.add_special_tokens(["<pad>", "<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=whole, pad_token="<pad>", eos_token="<end>", padding_side="left")
