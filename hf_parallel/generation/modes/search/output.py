"""SearchOutput: the best candidates, and the tree of all."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_parallel.generation.outputs import ALWAYS, ParallelOutput
from hf_parallel.transcript.tree import TreeNode

RETURNED = "returned"
ENDED = "ended"
DROPPED = "dropped"
"""What became of a candidate: it is returned, it has ended and is not returned, or a selection has dropped it."""
DRAWN_AS = {RETURNED: "selected", ENDED: "ended", DROPPED: "pruned"}
"""The same in the words of `TreeNode.outcome`."""


@dataclass
class SearchBranch:
    """One candidate of a search: a branch of the tree of candidates."""

    parent: int | None
    """Index of the candidate that it continues; None: it began at the prompt."""
    begin: int
    """Number of new tokens that it has from its parent."""
    end: int
    """Number of its new tokens, including those from its parent."""
    text: str
    """New text that it has written itself, without special tokens."""
    scores: list[tuple[int, float]] = field(default_factory=list)
    """Its number of new tokens and its score, at each selection and at its end."""
    places: int = 1
    """Places that it holds at the end, each of which has a vote; 0: it was dropped."""
    outcome: str = ENDED
    """`returned`, `ended` or `dropped`."""


@dataclass
class SearchOutput(ParallelOutput):
    """The best candidates of each prompt, and the tree of all.

    Attributes
    ----------
    sequences : int64 [batch * num_return_sequences, length]
        Each prompt with its best candidates, best first.
    """

    trees: list[list[SearchBranch]] = ALWAYS
    """Per row all candidates of its prompt, in the order in which they began: parents before their forks."""
    chosen: list[int] = ALWAYS
    """Per row the index of its candidate."""
    ratings: list[float] = ALWAYS
    """Per row its score."""
    answers: list[str | None] = ALWAYS
    """Per row the final answer in its text, if there is one."""
    votes: list[dict[str, float]] = ALWAYS
    """Per row the votes of its prompt's candidates by normal form (see `normal_form`), dropped ones excluded."""
    num_selections: list[int] = ALWAYS
    """Per row the number of selections of its prompt."""

    def tree(self, prompt: int) -> TreeNode | None:
        """Return the candidates of a prompt, each below the one that it continues."""
        root = TreeNode("prompt")
        nodes: list[TreeNode] = []
        for index, branch in enumerate(self.trees[prompt]):
            value = branch.scores[-1][1] if branch.scores else None
            node = TreeNode(f"candidate {index + 1}", DRAWN_AS[branch.outcome], value, branch.text)
            nodes.append(node)
            parent = root if branch.parent is None else nodes[branch.parent]
            parent.children.append(node)
        return root

    def notes(self, prompt: int) -> list[tuple[str, str]]:
        """Return the votes."""
        votes = self.votes[prompt]
        if not votes:
            return []
        return [("Votes", ", ".join(f"{form}: {round(count, 3)}" for form, count in votes.items()))]
