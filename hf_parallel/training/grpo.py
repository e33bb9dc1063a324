"""SharedPrefixGRPOTrainer: TRL's GRPOTrainer with a loss that computes each prompt once, and rollouts of all modes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from itertools import islice
from typing import Any, TypeAlias

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from trl import GRPOTrainer

from hf_parallel.cache.images import Image
from hf_parallel.generation.mixin import enable, unwrap
from hf_parallel.generation.prompts import Chat
from hf_parallel.generation.registry import MODES
from hf_parallel.generation.settings import Arguments
from hf_parallel.training.agent_rollouts import SampledRequest
from hf_parallel.training.attention import (
    LayoutBatch,
    computes_exactly,
    kernel_layers,
    layout_inputs,
    prepare_model,
    require_enabled,
)
from hf_parallel.training.collator import DataCollatorForParallel
from hf_parallel.training.conversations import Conversation
from hf_parallel.training.example import ParallelExample
from hf_parallel.training.images import OF_TOKENS, read_prompts
from hf_parallel.training.rollouts import EXAMPLES, REQUESTS, TEXTS, hold_conversations, sample_rows
from hf_parallel.training.states import states_branched
from hf_parallel.training.tree import Targets, computing_targets, distinct_targets, tree_batch
from hf_parallel.training.tree_rollouts import TREES, TreeRollouts, TreeRows

Rows: TypeAlias = Sequence[tuple[tuple[int, ...], list[int]]]
"""Prompts and completions."""
_COUNTS = ("num_images", "num_tiles")
"""Inputs of TRL that count the images of each row, which placeholders do."""
_CHANGE_SCORES = {
    "do_sample": True,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "guidance_scale": 1.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
    "watermarking_config": None,
}
"""Settings under which the loss does not know the distribution that was sampled, by the value that changes nothing."""
Layout: TypeAlias = tuple[Mapping[str, Any], list[Targets], Sequence[ParallelExample]]


class SharedPrefixLossMixin:
    """Mixin for TRL's `GRPOTrainer` and `RLOOTrainer` that computes log-probabilities over one tree per prompt.

    Losses and gradients equal the trainer's own. A prompt is computed once per micro-batch, so put all completions of a
    prompt into one: set `per_device_train_batch_size` to the size of the generation batch.
    """

    accelerator: Accelerator
    args: Any
    model: Any
    processing_class: Any
    temperature: float
    _entropy_bonus_enabled = False
    """Whether entropies have a part in the loss, which `GRPOTrainer` sets."""
    _tool_mask: torch.Tensor | None = None
    """Mask of the completion tokens that the model sampled, `[rows, length]`, in the next pass; None: all."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        inner = unwrap(self.model)
        tree = ParallelExample.from_tree([[0]], [[0]])
        with states_branched(inner, [tree]):  # raises if the model is unsupported
            tree_batch([tree], inner.config, inner.dtype, "cpu")

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **inputs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """Return log-probabilities and entropies `[rows, logits_to_keep]`; see `trl.GRPOTrainer`.

        0 for padding and for tokens of tools, for which the model computes no logits.
        """
        if compute_aux_loss:
            raise ValueError(f"{type(self).__name__} has no auxiliary loss of mixtures of experts")
        begin = input_ids.shape[1] - logits_to_keep
        inputs |= {"input_ids": input_ids, "attention_mask": attention_mask}
        prompt_inputs = {}
        for name, value in inputs.items():
            if value is not None and name not in _COUNTS:
                prompt_inputs[name] = value[:, :begin] if name in OF_TOKENS else value
        with self.accelerator.autocast():
            prompts, images = read_prompts(self._inner(model), prompt_inputs)
        completions = input_ids[:, begin:].cpu()
        masks = attention_mask[:, begin:].bool().cpu()
        pairs = []
        for prompt, completion, mask in zip(prompts, completions, masks, strict=True):
            pairs.append((tuple(prompt), completion[mask].tolist()))
        sampled = masks
        if self._tool_mask is not None:
            sampled = masks & self._tool_mask.bool().cpu()
        log_probs: list[torch.Tensor] = []
        entropies: list[torch.Tensor] = []
        size = batch_size or len(pairs)
        for start in range(0, len(pairs), size):
            chosen = slice(start, start + size)
            batch, targets, trees = self._layout(model, pairs, images, chosen)
            if self._tool_mask is not None:
                targets = [
                    row.where(of_row[mask].tolist())
                    for row, of_row, mask in zip(targets, sampled[chosen], masks[chosen], strict=True)
                ]
            inner = self._inner(model)
            targets, indices = distinct_targets(targets)
            ids = [token for row in targets for token in row.ids]
            labels = torch.tensor([ids], device=input_ids.device)
            with self.accelerator.autocast(), states_branched(inner, trees), computing_targets(inner, targets):
                layout: LayoutBatch | None = batch.get("block_cache")
                if layout is not None or self._needs_logits:
                    with nullcontext() if layout is None else kernel_layers(inner, layout):
                        logits = model(**batch).logits[0]
                    of_targets, entropy = self._score(logits, labels[0])
                else:
                    output = model(**batch, shift_labels=labels, fused_lm_head=True)  # TRL's, which stores no logits
                    of_targets = output.log_probs[0]
                    entropy = output.entropy[0] if compute_entropy else of_targets.new_empty(0)
            index = torch.tensor(indices, dtype=torch.int64, device=input_ids.device)
            log_probs.append(of_targets[index])
            if compute_entropy:
                entropies.append(entropy[index])
        sampled = sampled.to(input_ids.device)
        padded_entropies = _scattered(entropies, sampled) if compute_entropy else None
        return _scattered(log_probs, sampled), padded_entropies, None

    def _is_exact(self, model: nn.Module, images: Sequence[Image]) -> bool:
        """Whether the forward pass has the bits of inference, so that log-probabilities are those of sampling."""
        inner = self._inner(model)
        if images or (getattr(self.args, "cast_lm_head_to_fp32", False) and inner.dtype != torch.float32):
            return False
        with self.accelerator.autocast():
            return computes_exactly(inner)

    @property
    def _needs_logits(self) -> bool:
        """Whether TRL's fused head cannot compute the log-probabilities."""
        return False

    def _score(self, logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities of tokens, and entropies, given their logits `[N, vocabulary]`: `[N]` each."""
        if logits.dtype != torch.float64:
            logits = logits.float()
        every = self._scores(logits, ids).log_softmax(-1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._entropy_bonus_enabled):
            finite = every.masked_fill(every.isneginf(), 0.0)  # tokens that are excluded; 0 * inf is NaN
            entropies = -(every.exp() * finite).sum(-1)
        return every.gather(1, ids[:, None])[:, 0], entropies

    def _scores(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the scores from whose softmax the tokens `ids` `[N]` were sampled: `[N, vocabulary]`."""
        return logits / self.temperature

    def _inner(self, model: nn.Module) -> PreTrainedModel:
        return unwrap(self.accelerator.unwrap_model(model))

    def _layout(self, model: nn.Module, rows: Rows, images: Sequence[Image], chosen: slice) -> Layout:
        """Return arguments of the model for the chosen rows (prompt, completion), the targets of each row, and trees.

        The trees are those of the batch, none if the model computes them by itself, as a prepared one does.
        """
        inner = self._inner(model)
        batch_rows = rows[chosen]
        groups: dict[tuple[int, ...], list[int]] = {}  # rows by prompt
        for index, (prompt, _) in enumerate(batch_rows):
            groups.setdefault(prompt, []).append(index)
        trees: list[ParallelExample] = []
        targets: dict[int, Targets] = {}
        for prompt, members in groups.items():
            completions = [batch_rows[index][1] for index in members]
            tree = ParallelExample.from_tree([prompt] * len(members), completions)
            for row, index in enumerate(members):
                of_row = tree.target_rows == row
                queries = tree.target_queries[of_row].tolist()
                ids = tree.target_ids[of_row].tolist()
                targets[index] = Targets(len(trees), queries, ids)
            trees.append(tree)
        of_rows = [targets[index] for index in range(len(targets))]
        if self._is_exact(model, images):
            batch, _ = layout_inputs(inner, trees)
            return batch, of_rows, ()
        return tree_batch(trees, inner.config, inner.dtype, inner.device, images), of_rows, trees

    def _as_layouts(self, inner: PreTrainedModel, examples: Sequence[ParallelExample]) -> Mapping[str, Any]:
        """Return arguments of the model for the layouts of examples."""
        prepare_model(inner)
        batch = DataCollatorForParallel(self.processing_class)(examples)  # type: ignore[arg-type] # a tokenizer
        return {name: batch[name].to(inner.device) for name in ("input_ids", "position_ids", "past_key_values")}


class SharedPrefixGRPOTrainer(SharedPrefixLossMixin, GRPOTrainer):
    """TRL's `GRPOTrainer` with a loss that computes each prompt of a batch once (Hydragen, applied to training).

    Losses and gradients equal those of `GRPOTrainer`. Rollouts also share the prompt if the model is enabled and
    `generation_kwargs={"generation_mode": "shared_prefix"}`. A model that is given by name is enabled automatically.
    With a `rollout_func` from `make_rollout_func`, completions are runs of other modes, and their log-probabilities are
    computed from their layouts. With one from `make_tree_rollout_func`, they are paths of trees, whose nodes have
    advantages of their own.

    With this mode and `tools` or an `environment_factory`, an engine in this process holds the conversations of a
    batch. Each turn continues its conversation from the KV cache: only tool results are prefilled, and conversations do
    not wait for each other. Prompts, templates, limits and metrics follow TRL.

    Parameters
    ----------
    model, *args, **kwargs
        As in `GRPOTrainer`.
    sampled_log_probs : bool
        Use the log-probabilities that sampling returned as the old ones, so that no forward pass computes them. They
        refer to the distribution after temperature, `top_k`, `top_p` and `min_p`, and the loss uses the same
        distribution: tokens that these settings exclude have probability 0 (which never happens to a sampled token). On
        a CPU, an enabled model computes both with the same bits, so the first importance ratios are exactly 1.
    """

    computes_layouts = True

    def __init__(self, model: object, *args: object, sampled_log_probs: bool = False, **kwargs: object) -> None:
        self._takes_sampled = sampled_log_probs
        self._skips_pass = False  # whether TRL's next pass would compute the log-probabilities of sampling
        super().__init__(model, *args, **kwargs)
        self._check_sampled(kwargs.get("rollout_func") is not None)
        generation_kwargs = self.args.generation_kwargs or {}  # type: ignore[attr-defined]
        mode: str | None = generation_kwargs.get("generation_mode")
        if mode is not None and mode in MODES and not MODES[mode].traits.rows_continue_prompts:
            func = f"rollout_func=make_rollout_func({mode!r})"
            raise ValueError(f"rows of {mode} do not continue their prompts: instead of generation_kwargs, pass {func}")
        uses_mode = mode is not None and not self.use_vllm
        has_rollouts = kwargs.get("rollout_func") is not None
        if (uses_mode or has_rollouts) and isinstance(model, str):  # TRL has loaded it
            enable(self._inner(self.model))
        if uses_mode:
            require_enabled(self.accelerator.unwrap_model(self.model))
        self._holds_conversations = uses_mode and bool(self.tools)
        self._conversations: list[Conversation] = []  # of the batch that is generated
        self._examples: list[ParallelExample] | None = None  # layouts of the rows that are computed next
        self._requests: list[list[SampledRequest]] | None = None  # or their requests
        self._trees: list[TreeRows] | None = None  # whose rows are scored next
        self._rewards: torch.Tensor | None = None  # of these rows, [rows, functions]
        if isinstance(self.rollout_func, TreeRollouts):
            self.rollout_func.check(self)

    def _check_sampled(self, has_rollouts: bool) -> None:
        """Raise `ValueError` if the log-probabilities of sampling are wanted, but not known or not reproducible."""
        if not self._takes_sampled:
            return
        generation_kwargs = self.args.generation_kwargs or {}  # type: ignore[attr-defined]
        if self.use_vllm or not (has_rollouts or "generation_mode" in generation_kwargs):
            raise ValueError(
                "sampled_log_probs=True needs a mode of this package: name one in generation_kwargs, or pass a "
                "rollout_func of make_rollout_func"
            )
        for name, neutral in {**_CHANGE_SCORES, "temperature": self.temperature}.items():
            value = getattr(self._sampling_config, name, None)
            if value is not None and value != neutral:
                raise ValueError(f"sampled_log_probs=True needs {name}={neutral}, got {value}")

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: object, *args: object, **kwargs: object
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        if self._holds_conversations:
            if images:
                raise ValueError("rollouts with tools in an engine read text only, but prompts have images")
            self._conversations = hold_conversations(self, prompt_ids)
            # TRL parses the first answers; `_tool_call_loop` returns the rest.
            return [conversation.completion_ids[: conversation.turns[0]] for conversation in self._conversations], None
        if not self._takes_sampled:
            return super()._generate_single_turn(prompt_ids, images, *args, **kwargs)  # type: ignore[no-any-return]
        if images:
            raise ValueError("sampled_log_probs=True cannot be used for prompts with images")
        return sample_rows(self, prompt_ids)

    def _tool_call_loop(self, *args: Any) -> tuple[object, ...]:
        if not self._holds_conversations:
            return super()._tool_call_loop(*args)  # type: ignore[no-any-return]
        conversations = self._conversations
        self._conversations = []
        log_probs = [conversation.log_probs for conversation in conversations]
        return (
            [conversation.tool_mask for conversation in conversations],
            [conversation.messages for conversation in conversations],
            [conversation.completion_ids for conversation in conversations],
            log_probs if self._takes_sampled else None,
            sum(conversation.num_calls for conversation in conversations),
            sum(conversation.num_failures for conversation in conversations),
            [[] for _ in conversations],  # images of tools
        )

    def _generate(self, prompts: list[str | Chat]) -> tuple[object, ...]:
        outputs = list(super()._generate(prompts))
        tool_mask = outputs[2]
        if tool_mask is not None:
            rows = [torch.tensor(mask) for mask in tool_mask]
            self._tool_mask = pad_sequence(rows, batch_first=True, padding_value=1)
        fields = outputs[5]
        self._examples = fields.pop(EXAMPLES, None)
        self._requests = fields.pop(REQUESTS, None)
        self._trees = fields.pop(TREES, None)
        if TEXTS in fields:  # TRL has decoded the tokens of all rows in the order of sampling
            texts = fields.pop(TEXTS)
            completions = outputs[3]
            if isinstance(completions[0], list):
                outputs[3] = [[{"role": "assistant", "content": text}] for text in texts]
            else:
                outputs[3] = texts
        return tuple(outputs)

    def _generate_and_score_completions(self, inputs: list[Arguments]) -> Arguments:
        self._skips_pass = self._takes_sampled and self._computes_old_log_probs()
        try:
            output = super()._generate_and_score_completions(inputs)
        finally:
            self._skips_pass = False
            self._tool_mask = None
        if self._trees is not None:
            output["advantages"] = self._advantages_of_tokens(self._trees, output["completion_ids"])
            self._trees = None
        if self._takes_sampled:
            output["old_per_token_logps"] = output["sampling_per_token_logps"]
        # These are shuffled and split with the tensors.
        if self._examples is not None:
            output[EXAMPLES] = self._examples
        if self._requests is not None:
            output[REQUESTS] = self._requests
        return output

    def _calculate_rewards(self, inputs: list[Arguments], *args: Any) -> torch.Tensor:
        rewards: torch.Tensor = super()._calculate_rewards(inputs, *args)
        first = self.accelerator.process_index * len(inputs)
        self._rewards = rewards[first : first + len(inputs)]
        return rewards

    def _advantages_of_tokens(self, trees: Sequence[TreeRows], completion_ids: torch.Tensor) -> torch.Tensor:
        """Return the advantages of tokens that trees give their rows, in the shape of the completions."""
        assert self._rewards is not None
        weighted = self._rewards * self.reward_weights.to(self._rewards.device)
        rewards = weighted.nansum(1).masked_fill(self._rewards.isnan().all(1), torch.nan)
        advantages = self._rewards.new_zeros(completion_ids.shape)
        of_trees = rewards.view(len(trees), -1).tolist()
        of_rows = [row for tree, given in zip(trees, of_trees, strict=True) for row in tree.advantages(given)]
        for index, row in enumerate(of_rows):
            advantages[index, : len(row)] = torch.from_numpy(row)
        return advantages

    def _computes_old_log_probs(self) -> bool:
        """Whether TRL computes old log-probabilities with its first pass over new completions."""
        generations = self.args.steps_per_generation * self.num_iterations  # type: ignore[attr-defined]
        return bool(self.args.gradient_accumulation_steps % generations)  # type: ignore[attr-defined]

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        if self._skips_pass:  # the log-probabilities of sampling replace its result
            self._skips_pass = False
            return torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device), None, None
        given = model, input_ids, attention_mask, logits_to_keep, *args
        return super()._get_per_token_logps_and_entropies(*given, **kwargs)

    @property
    def _needs_logits(self) -> bool:
        # TRL's head does not exclude tokens. The temperature alone it knows.
        return self._takes_sampled and any(not isinstance(w, TemperatureLogitsWarper) for w in self._warpers)

    def _scores(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        scores = super()._scores(logits, ids)
        if not self._needs_logits:
            return scores
        with torch.no_grad():
            is_excluded = self._warpers(ids, logits).isneginf()  # type: ignore[arg-type]
            is_excluded[torch.arange(len(ids)), ids] = False
        return scores.masked_fill(is_excluded, float("-inf"))

    @cached_property
    def _sampling_config(self) -> GenerationConfig:
        """The settings of sampling, those of the model's own config included."""
        inner: Any = self._inner(self.model)
        config, _ = inner._prepare_generation_config(copy.deepcopy(self.generation_config))
        return config  # type: ignore[no-any-return]

    @cached_property
    def _warpers(self) -> LogitsProcessorList:
        """What sampling applies to logits, in the order of Transformers."""
        config = self._sampling_config
        warpers = LogitsProcessorList()
        if config.suppress_tokens is not None:
            warpers.append(SuppressTokensLogitsProcessor(config.suppress_tokens, self.accelerator.device))
        if config.temperature not in (None, 1.0):
            warpers.append(TemperatureLogitsWarper(config.temperature))
        if config.top_k:
            warpers.append(TopKLogitsWarper(config.top_k))
        if config.top_p is not None and config.top_p < 1:
            warpers.append(TopPLogitsWarper(config.top_p))
        if config.min_p is not None:
            warpers.append(MinPLogitsWarper(config.min_p))
        return warpers

    def _compute_loss(self, model: nn.Module, inputs: Arguments) -> torch.Tensor:
        self._examples = inputs.get(EXAMPLES)
        self._requests = inputs.get(REQUESTS)
        self._tool_mask = inputs.get("tool_mask")
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._tool_mask = None

    def _layout(self, model: nn.Module, rows: Rows, images: Sequence[Image], chosen: slice) -> Layout:
        if self._examples is None and self._requests is None:
            return super()._layout(model, rows, images, chosen)
        if images:
            raise ValueError("completions of a rollout_func cannot have images in their prompts")
        if self._requests is not None:
            return self._layout_requests(model, self._requests[chosen])
        assert self._examples is not None
        examples = self._examples[chosen]
        targets = [
            Targets(row, example.target_queries.tolist(), example.target_ids.tolist())
            for row, example in enumerate(examples)
        ]
        inner = enable(self._inner(model))
        if self._is_exact(model, images):
            batch, _ = layout_inputs(inner, examples)
            return batch, targets, ()
        return self._as_layouts(inner, examples), targets, ()

    def _layout_requests(self, model: nn.Module, rows: Sequence[Sequence[SampledRequest]]) -> Layout:
        """Return the layout of rows that consist of several requests: one tree, in which all share what they can."""
        inner = self._inner(model)
        requests = [request for row in rows for request in row]
        tree = ParallelExample.from_tree(
            [request.prompt for request in requests], [request.completion for request in requests]
        )
        queries = iter(tree.target_queries.tolist())
        ids = iter(tree.target_ids.tolist())
        targets = []
        for row in rows:
            num_tokens = sum(len(request.completion) for request in row)
            targets.append(Targets(0, list(islice(queries, num_tokens)), list(islice(ids, num_tokens))))
        if self._is_exact(model, ()):
            batch, _ = layout_inputs(inner, [tree])
            return batch, targets, ()
        return tree_batch([tree], inner.config, inner.dtype, inner.device), targets, [tree]


def _scattered(parts: Sequence[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    """Return the values of all tokens in a mask `[rows, length]`, in order, in its shape; 0 elsewhere."""
    values = torch.cat(list(parts))
    return values.new_zeros(mask.shape).masked_scatter(mask, values)
