"""Text and tokens of a run up to a budget of forward passes, read from its transcript.

Every mode records which row generated which token at which decode pass. So a run at the largest budget holds the texts
at all smaller ones (Hogwild! Inference, section 4.1: accuracy against the number of consecutive passes).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from hf_parallel.files import JSONObject
from hf_parallel.transcript.sections import GIVEN


@dataclass(frozen=True)
class Written:
    """Result of a run within a budget."""

    text: str
    """Texts of all rows: finished ones in the order in which they ended, then unfinished ones."""
    rows: list[str]
    """Text of each row (worker, answer, branch), without texts that span all rows, such as conclusions."""
    passes: int
    """Decode passes, at most the budget."""
    tokens: int
    """Generated tokens of all rows."""
    generated: list[list[tuple[int, str]]]
    """Decode pass and text of the tokens that each row of `rows` generated."""
    two_worker_passes: int
    """Decode passes that two workers would need that take turns at the rows (Hogwild! Inference, section 4.1)."""


def written_until(run: JSONObject, budget: int, *, has_conclusion: bool = True) -> Written:
    """Return the texts that the rows of a call with one prompt wrote within a budget of decode passes.

    Parameters
    ----------
    run : mapping
        The transcript of the call, `output.to_dict(tokenizer)`.
    budget : int
        Number of decode passes, at least 1.
    has_conclusion : bool
        Whether texts that span all rows count.
    """
    (section,) = run["sections"]
    final = (run["style"]["final_event"], "join")  # events that finish a text
    texts: list[tuple[float, str]] = []
    rows: dict[int, list[str]] = {}
    generated_by: dict[int, list[tuple[int, str]]] = {}
    passes = 0
    generated: set[tuple[int | None, int]] = set()  # a row generates one token per pass, of one or more pieces
    for card in section["cards"]:
        if card["begin"] >= budget or (card["column"] is None and not has_conclusion):
            continue
        column = card["column"]
        pieces = [(at, text, origin) for at, text, origin in card["pieces"] if at <= budget]
        sampled = [(at, text) for at, text, origin in pieces if origin != GIVEN]
        whole_text = card["given"] + "".join(text for _, text, _ in pieces)
        last = max((at for at, _, _ in pieces), default=card["begin"])
        is_finished = card["ended"] in final and len(pieces) == len(card["pieces"])
        texts.append((last if is_finished else math.inf, whole_text))
        if column is not None:
            rows.setdefault(column, []).append(whole_text)
            generated_by.setdefault(column, []).extend(sampled)
        generated |= {(column, at) for at, _ in sampled}
        passes = max(passes, last)
    ordered = [text.rstrip() for _, text in sorted(texts, key=lambda entry: entry[0])]
    active = Counter(at for _, at in generated)  # rows that generated a token, by pass
    two_worker_passes = 0
    for at in range(1, passes + 1):
        two_worker_passes += max(1, math.ceil(active[at] / 2))
    return Written(
        text="\n\n".join(filter(None, ordered)),
        rows=["".join(rows[column]) for column in sorted(rows)],
        passes=passes,
        tokens=len(generated),
        generated=[generated_by[column] for column in sorted(rows)],
        two_worker_passes=two_worker_passes,
    )
