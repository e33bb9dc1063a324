"""The table of models that read images in the docs equals what small models do; tokens equal `generate`'s.

The page is of one version of Transformers. With another one, these tests are skipped.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from image_table import GREEDY, NEW_TOKENS, PAGE, build, line, names, prompts, row_of
from tiny import make_prompts

import hf_parallel
from hf_parallel.models.intercept.attention import UnsupportedModelError

TEXT = PAGE.read_text(encoding="utf-8")
LINES = {cells[1].strip(" `"): cells for cells in (row.split("|") for row in TEXT.splitlines() if row[:3] == "| `")}
same_version = pytest.mark.skipif(
    f"Transformers {transformers.__version__}," not in " ".join(TEXT.split()), reason="the page is of another version"
)


@same_version
def test_page_has_a_row_for_each_name_and_most_work() -> None:
    assert sorted(LINES) == names()
    marks = [cells[2].strip() for cells in LINES.values()]
    assert marks.count("yes") > len(marks) / 2
    assert all(cells[5].strip() for cells in LINES.values() if cells[2].strip() != "yes"), "each refusal has a reason"


@pytest.mark.slow
@same_version
@pytest.mark.parametrize("name", names())
def test_row_of_the_page_equals_what_a_model_does(name: str) -> None:
    assert line(row_of(name)) in TEXT, "run: python tests/helpers/image_table.py"


@pytest.mark.parametrize("name", ["deepseek_vl", "minicpm_ocr", "qwen3_omni_moe_thinker", "video_llava", "step3p7"])
def test_layouts_of_images_give_the_tokens_of_generate(name: str) -> None:
    """Encoder of the inner model; patches side by side; positions as floats; features by image; tiles."""
    assert row_of(name)[1] == "yes"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mllama", "forward takes no features of images"),
        ("molmo2", "lets the tokens of an image see those of later images"),
        ("minicpmv4_7", "positions of text around images"),
        ("dots3_note", "dense rows, which cannot hold images"),
        ("hunyuan_vl", "positions on 4 axes"),
        ("phi4_multimodal", "forward takes no features of images"),
    ],
)
def test_other_models_refuse_images_with_a_reason_and_take_text(name: str, says: str) -> None:
    model = hf_parallel.enable(build(name))
    text = make_prompts([9])[0][None]
    if name == "minicpmv4_7":
        inputs = prompts(name, model, [[1]])
    else:
        pixels = "image_pixel_values" if name == "phi4_multimodal" else "pixel_values"
        inputs = {"input_ids": text, pixels: torch.zeros(1, 3, 16, 16, dtype=model.dtype)}
    with pytest.raises((ValueError, UnsupportedModelError), match=says):
        model.generate(**inputs, **GREEDY, generation_mode="shared_prefix")
    expected = model.generate(text, **GREEDY).sequences[0, -NEW_TOKENS:]
    found = model.generate(text, **GREEDY, generation_mode="shared_prefix").sequences[0, -NEW_TOKENS:]
    assert torch.equal(found, expected)
