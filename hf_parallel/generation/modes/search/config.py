"""`generation_mode="search"`: candidates that are scored while they decode; losers are dropped, winners are forked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.config import ModeTraits
from hf_parallel.generation.modes.candidates.rows import CandidateRows
from hf_parallel.generation.modes.search.run import SearchRun
from hf_parallel.generation.modes.search.settings import SearchSettings


@dataclass
class SearchConfig(SearchSettings):
    r"""Candidates of each prompt that are scored while they decode: losers are dropped, winners are forked.

    The `num_return_sequences` best are returned, best first. A fork shares all keys and values with the candidate that
    it continues, so it costs no prefill.

    Parameters
    ----------
    width : int
        Candidates of a prompt at any time. More than one require `do_sample=True`.
    interval : int, optional
        Tokens of each candidate between two selections. Default: 32 without a `boundary`, otherwise no limit.
    boundary : str, optional
        Text that ends the part of a candidate between two selections, such as a blank line. A candidate that has
        written it waits for the others of its prompt.
    warmup : int
        Tokens of each candidate before intervals and boundaries count.
    select : str
        `top`: the `keep` best continue, and forks of them, the best first, take the places of the others: beam search
        over thoughts. `tournament`: the same, with the default that a sixteenth of the places changes hands.
        `systematic`: each candidate gets places in proportion to its weight, as in a particle filter.
    keep : int, optional
        Candidates that continue, for `top` and `tournament`. Default: a quarter of `width` for `top`, rounded up;
        `width` less a sixteenth, at least 1, for `tournament`.
    selection_temperature : float
        For `systematic`: weights are the softmax of the scores divided by it.
    score : str
        `log_prob`: mean log-probability of a candidate's tokens under the model, including its parents' tokens.
        `confidence`: lowest group confidence (DeepConf). With a `scorer` or `scorer_model`, leave the default.
    confidence_window : int
        For `confidence`: tokens of a group.
    scorer : callable or str, optional
        Function from a `Candidate` to a number, the larger the better, or its name `"module:function"`, instead of
        `score`. It is not stored, and generation configs and servers cannot set it.
    scorer_model : PreTrainedModel or RewardModel, optional
        Reward model instead of `score`, see `RewardModel`. It shares the prefix of the candidates in its own cache. It
        is not stored, and generation configs and servers cannot set it.
    stop_on : str, optional
        `consensus`: at each selection, ask every candidate for its final answer, and end the search of a prompt once
        enough agree. The best candidate with this answer ends with it.
    consensus : float
        For `consensus`: fraction of the candidates that must agree, more than 0.5 and at most 1. A candidate of a
        particle filter counts once for each of its places.
    probe_prompt : str
        For `consensus`: text after which a candidate states its final answer. Probes are greedy, and no candidate sees
        them. A probe ends where no further text can change its answer: after `}` of `\boxed{42}`, or after the first
        character that follows a number, if the pattern is `(\d+)`.
    probe_tokens : int
        For `consensus`: maximum tokens of a probe.
    choose : str
        `best`: rank the candidates by their scores. `vote`: those whose final answer is the most frequent come first; a
        candidate of a particle filter has a vote for each of its places.
    answer_pattern : str
        For `consensus` and `vote`: regular expression of a final answer, as in `SelfConsistencyConfig`.

    Notes
    -----
    A `ParallelStreamer` receives candidate `k` of prompt `p` as row `p * width + k`, and forks after all others. `put`
    receives the returned tokens once they are known.
    """

    mode: ClassVar[str] = "search"
    traits = ModeTraits(
        rows=CandidateRows,
        keeps_states=True,
        streams_text=True,
        streams_tokens="at_end",
        rows_setting="width",
        example_arguments={"do_sample": "True"},
    )

    def make_run(self, call: GenerationCall) -> SearchRun:
        return SearchRun(self, call)
