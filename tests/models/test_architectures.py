"""The table of architectures in the docs equals what probing finds, and supported models generate as Transformers.

The page is of one version of Transformers. With another one, these tests are skipped.
"""

from __future__ import annotations

import hybrids
import mapping
import pytest
import tiny
import torch
import transformers
from architecture_table import PAGE, line, names, row_of
from transformers import GenerationConfig

import hf_parallel

TEXT = PAGE.read_text(encoding="utf-8")
LINES = {cells[1].strip(" `"): cells for cells in (row.split("|") for row in TEXT.splitlines() if row[:3] == "| `")}
UNTESTED = [name for name in mapping.NAMES if name not in {*tiny.ARCHITECTURES, *hybrids.ARCHITECTURES}]
WORKING = [name for name in UNTESTED if name in LINES and LINES[name][2].strip() == "yes"]
same_version = pytest.mark.skipif(
    f"Transformers {transformers.__version__}," not in " ".join(TEXT.split()), reason="the page is of another version"
)


@same_version
def test_page_has_a_row_for_each_name_and_most_are_supported() -> None:
    assert sorted(LINES) == names()
    built = [LINES[name][2].strip() for name in mapping.NAMES]
    assert built.count("yes") > 2 * built.count("no")


@pytest.mark.slow
@same_version
@pytest.mark.parametrize("name", names())
def test_row_of_the_page_equals_the_probed_capabilities(name: str) -> None:
    assert line(row_of(name)) in TEXT, "run: python tests/helpers/architecture_table.py"
    tiny.clear_cache()


@pytest.mark.slow
@same_version
@pytest.mark.parametrize("name", WORKING)
def test_greedy_rows_of_supported_models_equal_generate(name: str) -> None:
    """Three rows of one prompt, and a left-padded batch."""
    model = tiny.build(name)
    model.generation_config = GenerationConfig(pad_token_id=tiny.PAD, bos_token_id=tiny.BOS)
    settings = {"do_sample": False, "max_new_tokens": 12}
    prompts = tiny.make_prompts([24, 9, 17])
    ids = prompts[0].expand(3, -1)
    padded, mask = tiny.left_pad(prompts)
    expected = [model.generate(prompt[None], **settings)[0, len(prompt) :] for prompt in prompts]
    hf_parallel.enable(model)
    rows = model.generate(ids, generation_mode="shared_prefix", **settings)
    batch = model.generate(padded, attention_mask=mask, generation_mode="shared_prefix", **settings)
    tiny.clear_cache()
    assert torch.equal(rows[:, ids.shape[1] :], expected[0].expand(3, -1))
    assert torch.equal(batch[:, padded.shape[1] :], torch.stack(expected))


@pytest.mark.parametrize("name", [*tiny.ARCHITECTURES, *hybrids.ARCHITECTURES, *WORKING])
def test_logits_of_the_models_of_the_tests_depend_on_the_beginning_of_a_prompt(name: str) -> None:
    """Else comparisons of them would not notice a prompt that is lost in part."""
    model = tiny.build(name)
    prompt, other = tiny.make_prompts([40])[0], tiny.make_prompts([20], seed=1)[0]
    ids = torch.stack([prompt, torch.cat([other, prompt[20:]])])
    with torch.no_grad():
        logits, changed = model(ids).logits[:, -1]
    tiny.clear_cache()
    assert (logits - changed).abs().max() > 0.05 * logits.std()
