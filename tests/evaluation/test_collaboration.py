"""Collaboration measured from what workers wrote: duplicated work, names, results that others use."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_parallel.evaluation.collaboration import NGRAM, duplicated_work, measure, names_mentioned, reused_results

LABELS = "ABCDEFGHIJKL"
WORDS = st.lists(st.tuples(st.sampled_from(range(9)), st.sampled_from("abc")), max_size=24)


def row(*texts: str, begin: int = 1, step: int = 1) -> list[tuple[int, str]]:
    return [(begin + step * index, text) for index, text in enumerate(texts)]


@given(st.lists(WORDS, min_size=1, max_size=3), st.lists(st.sampled_from("abc"), max_size=6))
def test_duplicated_work_equals_its_definition(drawn: list[list[tuple[int, str]]], prompt: list[str]) -> None:
    """For each phrase of a row, whether another row has one that is equal and earlier, or as early in a row before."""
    rows = [sorted(pieces, key=lambda piece: piece[0]) for pieces in drawn]
    given = {tuple(prompt[i : i + NGRAM]) for i in range(len(prompt) - NGRAM + 1)}
    phrases = [
        (at, index, tuple(word for _, word in pieces[last + 1 - NGRAM : last + 1]))
        for index, pieces in enumerate(rows)
        for last, (at, _) in enumerate(pieces)
        if last >= NGRAM - 1
    ]
    phrases = [one for one in phrases if one[2] not in given]
    again = [
        any(other[2] == phrase and other[1] != index and other[:2] < (at, index) for other in phrases)
        for at, index, phrase in phrases
    ]
    spelled = [[(at, f" {word.upper()}," if at % 2 else f" {word}") for at, word in pieces] for pieces in rows]
    expected = sum(again) / len(again) if again else 0.0
    assert duplicated_work(spelled, " ".join(prompt)) == pytest.approx(expected)


def solve(rng: random.Random, chance: float) -> tuple[float, float]:
    """Let two workers share twelve tasks. Return the fraction of answers to a solved task, counted and measured.

    A worker takes a task that the other has solved with the given chance.
    """
    terms = rng.sample(range(10, 99), len(LABELS))
    free = [f" Task {label}: seven plus {term} is worked out.\n" for label, term in zip(LABELS, terms, strict=True)]
    done: list[list[str]] = [[], []]
    rows: list[list[tuple[int, str]]] = [[], []]
    repeated = 0
    for step in range(len(LABELS)):
        worker = step % 2
        others = [text for text in done[1 - worker] if text not in done[worker]]
        is_repeated = bool(others) and rng.random() < chance
        text = rng.choice(others) if is_repeated else free.pop()
        repeated += is_repeated
        done[worker].append(text)
        rows[worker].append((step, text))
    return repeated / len(LABELS), duplicated_work(rows, "Solve these tasks.")


def ranks(values: Sequence[float]) -> np.ndarray:
    return (np.less.outer(values, values).sum(0) + np.less_equal.outer(values, values).sum(0) - 1) / 2


def test_duplicated_work_ranks_runs_as_the_exact_count_of_repeated_tasks() -> None:
    rng = random.Random(0)
    counted, measured = zip(*(solve(rng, run / 60) for run in range(60)), strict=True)
    for truth, value in zip(counted, measured, strict=True):
        assert (value > 0) == (truth > 0)
        assert value == pytest.approx(truth, abs=0.1)
    assert np.corrcoef(ranks(counted), ranks(measured))[0, 1] > 0.95  # 0.98 seen
    assert max(counted) > 0.4


def test_repeated_tasks_of_fewer_words_than_a_phrase_are_not_seen() -> None:
    same = " a 7+5=12\n"  # four words
    assert duplicated_work([row(same, " b 30+4=34\n"), row(same, " c 18+6=24\n", begin=5)]) == 0
    assert duplicated_work([row(same, " b 30+4=34\n"), row(same, " b 30+4=34\n", begin=5)]) == 0.5


def test_names_of_others_are_counted_per_hundred_words() -> None:
    alice = row("Al", "ice", " asks Bob", ": did", " Bob add?")  # a name may be of several tokens, and is not its own
    bob = row("Bobby says yes to Alice", "", begin=3)
    assert names_mentioned([alice, bob], ["Alice", "Bob"]) == pytest.approx(100 * 3 / 11)
    assert names_mentioned([[], []], ["Alice", "Bob"]) == 0


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row("6 * 7 = 42"), row("then 42 + 8", begin=2)], 1.0),
        ([row("6 * 7 = $\\boxed{", "42", "}$"), row("so 42", begin=5)], 1.0),
        ([row("6 * 7 = 42"), row("then 42 + 8 = 50", begin=2)], 0.5),  # nobody uses the 50
        ([row("6 * 7 = 42"), row("6 * 7 = 42, so 42 + 8", begin=2)], 0.0),  # it computed the number itself
        ([row("6 * 7 = 42"), row("then 42 + 8", begin=1)], 0.0),  # at the same pass
        ([row("6 * 7 = 42, and 42 + 8")], 0.0),  # its own result
        ([row("6 * 7 = 42"), row("then 142 or 4.42 or 42.5", begin=2)], 0.0),
        ([row("12,000 / 2 = 6,000"), row("then 6000 + 1", begin=2)], 1.0),
        ([row("x = 30 * 2"), row("then 30", begin=2)], None),  # a term is no result
        ([row("2 + 3 = 5"), row("then 5", begin=2)], None),  # too small to tell
        ([row("= 17"), row("then 17", begin=2)], None),  # of the prompt
    ],
)
def test_a_result_is_reused_if_another_row_has_it_later(rows: list, expected: float | None) -> None:
    assert reused_results(rows, "Take 17 apples.") == expected
    found = measure(rows, ["Alice", "Bob"][: len(rows)], "Take 17 apples.")
    assert found.get("reused") == expected
    assert set(found) == {"duplicated", "mentions", "reused"} - ({"reused"} if expected is None else set())
