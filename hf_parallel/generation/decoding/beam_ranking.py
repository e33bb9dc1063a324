"""BeamRanking: which continuations of beams are searched further, and which finished sequences are the best so far.

It is the loop of `_beam_search` of Transformers without the model, over the same functions and the same tensors, so
that sequences, scores and ties are those of `generate`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.sampling.rng import CannotDrawError, RowRNG, exponential_noise, next_keys

_IMPOSSIBLE = -1e9
"""Score of what must not be chosen, as in Transformers."""


class RankedBeams(NamedTuple):
    """The returned sequences, best first for each prompt."""

    sequences: torch.Tensor  # int64 [rows, length], padded
    scores: torch.Tensor  # float32 [rows], with the length penalty
    beam_indices: torch.Tensor  # int32 [rows, new tokens], the beam that each token continued; -1: none
    log_probs: torch.Tensor  # float32 [rows, new tokens], log-softmax of unprocessed logits; NaN after the end

    @property
    def num_new(self) -> list[int]:
        """Number of new tokens of each sequence."""
        return (self.beam_indices >= 0).sum(1).tolist()


class BeamRanking:
    """Beams of the prompts of a call, `num_beams` each, of which `input_ids` has one row per beam.

    `rngs` are one per prompt, for `do_sample`; None: PyTorch's global generator, used as `generate` uses it.
    """

    is_done = False
    """Whether the search has ended."""

    def __init__(self, call: GenerationCall, rngs: list[RowRNG] | None = None) -> None:
        config = call.generation_config
        self._call = call
        self._model: Any = call.model
        self._rngs = rngs
        self.num_beams: int = config.num_beams
        self.num_prompts = call.num_rows // self.num_beams
        self._begin = self._length = call.input_ids.shape[1]
        end_tokens = len(call.eos_token_ids)
        self._num_kept = max(2, 1 + end_tokens) * self.num_beams
        device = call.input_ids.device
        self._is_top = torch.arange(self._num_kept, device=device) < self.num_beams
        shape = (self.num_prompts, self.num_beams)
        self._running = torch.full((*shape, call.max_length), self._filler, dtype=torch.int64, device=device)
        self._running[:, :, : self._begin] = call.input_ids.reshape(*shape, -1)
        self._finished = self._running.clone()
        self._running_scores = torch.zeros(shape, device=device)
        self._running_scores[:, 1:] = _IMPOSSIBLE  # the beams of a prompt are still equal: only the first continues
        self._finished_scores = torch.full(shape, _IMPOSSIBLE, device=device)
        self._is_finished = torch.zeros(shape, dtype=torch.bool, device=device)
        self._can_improve = torch.ones((self.num_prompts, 1), dtype=torch.bool, device=device)
        num_new = call.max_length - self._begin
        self._running_origins = torch.full((*shape, num_new), -1, dtype=torch.int32, device=device)
        self._finished_origins = self._running_origins.clone()
        returns = bool(config.return_dict_in_generate)
        self.scores: list[torch.Tensor] | None = [] if returns and config.output_scores else None
        """Processed scores of each step, float32 `[beams, vocabulary]`, if requested."""
        self.logits: list[torch.Tensor] | None = [] if returns and config.output_logits else None
        """Logits of each step, if requested."""
        self._vocabulary = 0
        self._log_probs: list[tuple[torch.Tensor, torch.Tensor]] | None = [] if returns else None
        # of each step: the continuations that were kept, `beam * vocabulary + token`, and their log-probabilities

    @property
    def _filler(self) -> int:
        """Token after the end of a sequence, as Transformers chooses it: its pad token 0 counts as none."""
        end_tokens = self._call.eos_token_ids
        pad: torch.Tensor | None = self._call.generation_config._pad_token_tensor  # type: ignore[attr-defined]
        if not end_tokens:
            return -1
        return int(pad) if pad is not None and int(pad) else end_tokens[0]

    def rank(self, logits: torch.Tensor) -> None:
        """Choose the next beams, given the logits `[beams, vocabulary]` of all beams."""
        call = self._call
        config = call.generation_config
        length = self._length
        if self.logits is not None:
            self.logits.append(logits.float())
        log_probs = logits.log_softmax(-1, dtype=torch.float32)
        ids = self._running[:, :, :length].flatten(0, 1)
        processed = log_probs
        if call.logits_processor:  # which may change its argument
            processed = call.logits_processor(ids, log_probs.clone())  # type: ignore[arg-type]
        if self.scores is not None:
            self.scores.append(processed)
        vocabulary = self._vocabulary = processed.shape[-1]
        totals = processed.view(self.num_prompts, self.num_beams, vocabulary) + self._running_scores[:, :, None]
        totals = totals.flatten(1)
        draws = bool(config.do_sample)
        if draws and self._rngs is not None:
            totals = _drawn(totals, self._num_kept, self._rngs)
            draws = False
        top_scores, top, top_origins = self._model._get_top_k_continuations(
            accumulated_log_probs=totals,
            running_sequences=self._running,
            running_beam_indices=self._running_origins,
            cur_len=length,
            decoder_prompt_len=self._begin,
            do_sample=draws,
            beams_to_keep=self._num_kept,
            num_beams=self.num_beams,
            vocab_size=vocabulary,  # which some versions of Transformers have as a parameter
            batch_size=self.num_prompts,
        )
        if self._log_probs is not None:
            origins = top_origins[:, :, length - self._begin].flatten().long()
            tokens = top[:, :, length].flatten()
            self._log_probs.append((origins * vocabulary + tokens, log_probs[origins, tokens]))
        scores = None if self.scores is None else tuple(self.scores)
        is_ended = call.stopping_criteria(top[:, :, : length + 1].flatten(0, 1), scores)
        is_ended = is_ended.view(self.num_prompts, self._num_kept)
        self._running, self._running_scores, self._running_origins = self._model._get_running_beams_for_next_iteration(
            topk_log_probs=top_scores,
            topk_running_sequences=top,
            topk_running_beam_indices=top_origins,
            next_token_hits_stopping_criteria=is_ended,
            num_beams=self.num_beams,
        )
        self._finished, self._finished_scores, self._finished_origins, self._is_finished = (
            self._model._update_finished_beams(
                sequences=self._finished,
                topk_running_sequences=top,
                beam_scores=self._finished_scores,
                topk_log_probs=top_scores,
                beam_indices=self._finished_origins,
                topk_running_beam_indices=top_origins,
                is_early_stop_heuristic_unsatisfied=self._can_improve,
                is_sent_finished=self._is_finished,
                next_token_hits_stopping_criteria=is_ended,
                top_num_beam_mask=self._is_top,
                num_beams=self.num_beams,
                cur_len=length,
                decoder_prompt_len=self._begin,
                length_penalty=config.length_penalty,
                early_stopping=config.early_stopping,
            )
        )
        self._length += 1
        self._can_improve = self._model._check_early_stop_heuristic(
            is_early_stop_heuristic_unsatisfied=self._can_improve,
            running_beam_scores=self._running_scores,
            beam_scores=self._finished_scores,
            is_sent_finished=self._is_finished,
            cur_len=self._length,
            max_length=call.max_length,
            decoder_prompt_len=self._begin,
            early_stopping=config.early_stopping,
            length_penalty=config.length_penalty,
        )
        continues = self._model._beam_search_has_unfinished_sequences(
            self._can_improve, self._is_finished, is_ended, config.early_stopping
        )
        self.is_done = not bool(continues)

    def beams(self) -> tuple[list[int], list[int]]:
        """Return the beam that each beam continues, and its last token; beams are numbered over all prompts."""
        last = self._length - 1
        origins = self._running_origins[:, :, last - self._begin].long()
        tokens = self._running[:, :, last]
        parents, appended = torch.stack((origins.flatten(), tokens.flatten())).tolist()
        return parents, appended

    def result(self) -> RankedBeams:
        """Return the best finished sequences: `num_return_sequences` of each prompt."""
        count = self._call.generation_config.num_return_sequences or 1
        sequences = self._finished[:, :count].flatten(0, 1)
        scores = self._finished_scores[:, :count].flatten()
        origins = self._finished_origins[:, :count].flatten(0, 1)
        num_new = int((origins >= 0).sum(1).max())
        sequences = sequences[:, : self._begin + num_new]
        origins = origins[:, :num_new]
        return RankedBeams(sequences, scores, origins, self._log_probs_of(sequences[:, self._begin :], origins))

    def _log_probs_of(self, tokens: torch.Tensor, origins: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of new tokens, `[rows, new tokens]`, which continued the beams `origins`."""
        values = torch.full(tokens.shape, torch.nan, device=tokens.device)
        if self._log_probs is None:
            return values
        for step, (keys, log_probs) in enumerate(self._log_probs[: tokens.shape[1]]):
            wanted = origins[:, step].long() * self._vocabulary + tokens[:, step]
            place = (keys == wanted[:, None]).int().argmax(1)
            values[:, step] = torch.where(origins[:, step] >= 0, log_probs[place], torch.nan)
        return values


def _drawn(totals: torch.Tensor, count: int, rngs: list[RowRNG]) -> torch.Tensor:
    """Draw `count` continuations of each prompt without replacement; return `totals`, with minus infinity for others.

    Raises `CannotDrawError` if fewer have a probability.
    """
    probs = totals.softmax(-1)
    if bool(((probs > 0).sum(-1) < count).any()):
        raise CannotDrawError(f"cannot draw {count} continuations of a prompt: fewer have a probability above 0")
    keys = next_keys(rngs, totals.device)
    every = torch.arange(totals.shape[1], device=totals.device)
    noise = exponential_noise(keys[:, None], every)
    chosen = (probs / noise).topk(count).indices
    drawn = torch.full_like(totals, -torch.inf)
    return drawn.scatter(1, chosen, totals.gather(1, chosen))
