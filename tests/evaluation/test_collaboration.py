"""Collaboration measured from what workers wrote: duplicated work, names, results that others use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_parallel.evaluation.collaboration import NGRAM, duplicated_work, measure, names_mentioned, reused_results

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
