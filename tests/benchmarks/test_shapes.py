"""`python -m benchmarks engines --shape` measures random weights, in the formats of the demo model's file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

import benchmarks.__main__
from benchmarks.engine_parts import shapes
from hf_parallel.kernels import native
from hf_parallel.models.loading import load_model

gguf = pytest.importorskip("gguf")
needs_compiler = pytest.mark.skipif(bool(native.unavailable_reason()), reason="packed weights need a C compiler")
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "head_dim": 32, "vocab_size": shapes.VOCABULARY + 8}
SIZES |= {"tie_word_embeddings": True}


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a tiny shape, whose file will be written to `tmp_path`."""
    monkeypatch.setitem(shapes.CONFIGS, "tiny", Qwen3Config(**SIZES))
    monkeypatch.setattr(shapes, "SHAPES", ["tiny"])
    monkeypatch.setattr(shapes, "cache_folder", lambda: tmp_path)
    return "tiny"


def test_a_shape_is_written_once_with_the_formats_of_the_demo_model(tiny: str) -> None:
    from hf_parallel.models.loading.gguf_reader import read  # imports gguf

    file = shapes.random_model(tiny)
    written = file.stat().st_mtime_ns
    assert shapes.random_model(tiny).stat().st_mtime_ns == written
    tensors = read(file).tensors
    for name, tensor in tensors.items():
        expected = "F32" if "norm" in name else "Q8_0" if name == "token_embd.weight" else "Q4_1"
        assert tensor.tensor_type.name == expected, name
    matrix = tensors["blk.1.ffn_up.weight"]
    assert gguf.dequantize(matrix.data, matrix.tensor_type).std() == pytest.approx(shapes.DEVIATION, rel=0.05)
    shapes.write(shapes.CONFIGS[tiny], file.with_name("again"), "tiny, random weights")
    assert file.read_bytes() == file.with_name("again").read_bytes()


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_weights_and_the_tokenizer_of_a_shape_can_be_loaded(
    is_tied: bool, tmp_path: Path, embedded: tuple[Any, Any]
) -> None:
    file = tmp_path / "a.gguf"
    shapes.write(Qwen3Config(**SIZES | {"tie_word_embeddings": is_tied}), file)
    plain, tokenizer = load_model(str(file))
    packed, _ = load_model(str(file), weights="packed")
    assert len(tokenizer) == SIZES["vocab_size"]
    text = "What did the guest of the hotel like?"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    assert ids[0].tolist() == embedded[1](text)["input_ids"]
    with torch.no_grad():
        logits = plain(ids).logits
        torch.testing.assert_close(packed(ids).logits, logits, rtol=0, atol=1e-5 * logits.abs().max().item())
    assert logits.shape[-1] == SIZES["vocab_size"]


def test_an_unknown_shape_raises() -> None:
    assert "Qwen3-0.6B" in shapes.SHAPES
    with pytest.raises(ValueError, match=r"shape must be one of \[.*'Qwen3-0.6B'.*\], got 'Qwen3-0.5B'"):
        shapes.random_model("Qwen3-0.5B")


@pytest.mark.slow
@needs_compiler
def test_the_report_of_a_shape_names_it(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "report.json"
    given = ["--quick", "--shape", tiny, "--ways", "ours,packed_int8", "--cases", "24:2", "--questions", "2"]
    monkeypatch.setattr("sys.argv", ["benchmarks", "engines", *given, "--output", str(report)])
    assert benchmarks.__main__.main() == 0
    found = json.loads(report.read_text())
    assert found["model"] == "tiny, random weights"
    for case in found["cases"]:
        for way in case["ways"].values():
            assert way["wall"]["seconds"] > 0
    assert str(tmp_path) not in report.read_text()
