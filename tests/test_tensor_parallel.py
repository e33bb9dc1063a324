"""Tensor parallelism of transformers: two processes that hold half of each layer generate the tokens of one."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from tensor_parallel_rank import sequences


@pytest.mark.slow
def test_two_ranks_generate_the_tokens_of_one_process_in_all_modes(tmp_path: Path) -> None:
    tiny.build("llama").save_pretrained(tmp_path / "model")
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        + [str(here / "tensor_parallel_rank.py"), str(tmp_path / "model"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{here.parent}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    expected = sequences(copy.deepcopy(tiny.build("llama")))
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["shard"] == [32, 64]
        assert found["sequences"] == expected
        assert "tensor-parallel" in found["engine"]
