"""Keys of cached logits: rows that have seen other things have other keys, and saved files keep their meaning."""

from __future__ import annotations

from itertools import product

import numpy as np
import torch

from hf_parallel.cache.images import Image
from hf_parallel.cache.logits_key import LogitsKey, are_steps, is_in_text, is_token, state_step

VOCABULARY = 50


def prompts() -> list[LogitsKey]:
    """Return the keys of prompts of up to three tokens, two different ones, with up to two masked ones between."""
    keys: list[LogitsKey] = []
    for length in (1, 2, 3):
        for tokens in product((0, 1), repeat=length):
            for counts in product((0, 1, 2), repeat=length - 1):
                gaps = {index: count for index, count in enumerate(counts, start=1) if count}
                keys.append(LogitsKey.of_prompt(np.array(tokens), gaps))
    return keys


def test_rows_that_have_seen_different_things_have_different_keys() -> None:
    keys = prompts()
    trunk = LogitsKey((3,))
    first, second = (trunk.then([4]).branch(index) for index in range(2))
    keys += [trunk, trunk.then([4]), first, second, first.then([5]), second.then([5])]
    for positions in ("rotate", "reencode"):
        keys += [trunk.join([4], [first.then([5]), second], positions), trunk.join([4], [first, second], positions)]
        keys.append(trunk.join([4], [second, first], positions))
    assert len(set(keys)) == len(keys)
    assert sorted(keys) == sorted(keys, key=lambda key: key.steps)


def test_a_step_is_a_token_an_image_or_neither() -> None:
    image = int(Image(key=5, features=(torch.zeros(2, 3),)).ids[1])
    masked = LogitsKey.of_prompt(np.array([5, 6]), {1: 2}).steps[1]
    branch = LogitsKey().branch(1).steps[0]
    join = LogitsKey().join([], [LogitsKey((1,))], "rotate").steps[0]
    steps = [0, VOCABULARY - 1, image, masked, branch, join, state_step(b"\0" * 32)]
    assert [is_token(step) for step in steps] == [True, True] + [False] * 5
    assert [is_in_text(step) for step in steps] == [True] * 3 + [False] * 4
    assert are_steps(torch.tensor(steps), VOCABULARY).all()
    assert not are_steps(torch.tensor([VOCABULARY, image - (1 << 61)]), VOCABULARY).any()


def test_steps_are_those_of_saved_files() -> None:
    assert LogitsKey.of_prompt(np.array([5, 6, 7]), {1: 3}).steps == (5, -3, 6, 7)
    assert state_step(bytes(range(32))) == -141843476153092
    trunk = LogitsKey((3,))
    branches = [trunk.then([7]).branch(0).then([1]), trunk.then([7]).branch(1)]
    assert trunk.join([7], branches, "rotate").then([9]).steps == (3, 7, -78476540259360338, 9)
