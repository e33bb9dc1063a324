"""Modes as `custom_generate` repositories: exported, uploaded, loaded by transformers alone."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers
import tiny
import torch
from hub_server import Hub
from mode_cases import BUILT_IN, every_setting
from packaging.version import Version
from paths import ROOT
from transformers import AutoModelForCausalLM, GenerationConfig, pipeline
from transformers.integrations.peft import MIN_PEFT_VERSION

import hf_parallel.pipelines
from hf_parallel import HogwildConfig, ParallelConfig
from hf_parallel.generation import MODES
from hf_parallel.generation.config import make_config
from hf_parallel.hub import CARD, CARD_MARK, GENERATE, REQUIREMENTS, export, generate_as

SETTINGS = {"num_workers": 3, "layout": "interleaved", "collaboration_prompt": "{names}: \"talk\"\n```'''\\"}
PROMPT = "Oslo or Rome?"
OF_CONFIG = {GENERATE, REQUIREMENTS, CARD}
OF_MODEL = OF_CONFIG | {"config.json", "generation_config.json", "model.safetensors"}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model() -> Any:
    model = copy.deepcopy(tiny.build("llama"))
    model.generation_config.generation_mode = "hogwild"
    model.generation_config.parallel_config = dict(SETTINGS)
    return model


@pytest.fixture
def tokenizer() -> Any:
    return copy.deepcopy(small_tokenizers.make("split_marker"))


@pytest.fixture(autouse=True)
def _modules(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy code of repositories to a temporary folder instead of the user's cache."""
    folder = str(tmp_path_factory.mktemp("modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", folder)
    monkeypatch.setattr(sys, "path", [*sys.path])


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def written(folder: Path) -> ParallelConfig:
    """Return the config in the code of a repository."""
    space: dict[str, Any] = {}
    exec(compile((folder / GENERATE).read_text(encoding="utf-8"), GENERATE, "exec"), space)
    return make_config(space["MODE"], space["SETTINGS"])


# Export


@pytest.mark.parametrize("mode", BUILT_IN)
def test_every_setting_is_restored(mode: str, model: Any, tmp_path: Path) -> None:
    config = MODES[mode](**every_setting(mode))
    export(config, tmp_path / "config")
    assert written(tmp_path / "config") == config
    model.generation_config.generation_mode, model.generation_config.parallel_config = mode, config
    export(model, tmp_path / "model")
    assert written(tmp_path / "model") == config
    stored = GenerationConfig.from_pretrained(tmp_path / "model")
    assert make_config(stored.generation_mode, stored.parallel_config) == config


@pytest.mark.parametrize("mode", BUILT_IN)
def test_configs_alone_are_saved_uploaded_and_loaded(mode: str, tmp_path: Path, local_hub: Hub) -> None:
    config = MODES[mode](**every_setting(mode))
    config.save_pretrained(tmp_path)
    assert names(tmp_path) == {"generation_config.json"}
    assert ParallelConfig.from_pretrained(tmp_path) == type(config).from_pretrained(tmp_path) == config
    config.push_to_hub("only-config")
    assert set(local_hub.files("somebody/only-config")) == names(tmp_path)
    text = (tmp_path / "generation_config.json").read_bytes()
    assert local_hub.files("somebody/only-config")["generation_config.json"] == text
    other = MODES["best_of" if mode != "best_of" else "pdos"]
    with pytest.raises(ValueError, match=f"must store a generation_mode of {other.__name__}, got '{mode}'"):
        other.from_pretrained(tmp_path)


def test_an_object_of_the_process_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="logits_cache cannot be stored"):
        HogwildConfig(logits_cache=hf_parallel.LogitsCache()).save_pretrained(tmp_path)
    GenerationConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="got None"):
        ParallelConfig.from_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"generation_mode": ["x"]}')
    with pytest.raises(ValueError, match=r"got \['x'\]"):
        ParallelConfig.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="generation_mode must be one of .* got ''"):
        ParallelConfig().save_pretrained(tmp_path / "without-mode")
    assert not (tmp_path / "without-mode").exists()


def test_values_of_a_model_are_kept_where_a_config_is_saved(tmp_path: Path, local_hub: Hub) -> None:
    values = {"eos_token_id": [2, 3], "temperature": 0.3, "do_sample": False, "of_another_library": 1}
    stored = {**values, "generation_mode": "pdos", "parallel_config": {"titles": ["a"]}}
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(stored))
    local_hub.repositories["somebody/model"] = [{path.name: path.read_bytes(), "README.md": b"card"}]
    config = HogwildConfig(num_workers=3)
    config.save_pretrained(tmp_path)
    config.push_to_hub("model")
    files = local_hub.files("somebody/model")
    assert {*files} == {path.name, "README.md"}
    for text in (path.read_bytes(), files[path.name]):
        assert json.loads(text) == {**values, "generation_mode": "hogwild", "parallel_config": {"num_workers": 3}}


# Errors


def test_a_failed_export_leaves_no_files(model: Any, tmp_path: Path) -> None:
    class Failing:
        def save_pretrained(self, folder: Any) -> None:
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        export(model, tmp_path / "new", tokenizer=Failing())
    assert list(tmp_path.iterdir()) == []
    export(model, tmp_path)
    with pytest.raises(OSError, match="no space left"):
        export(model, tmp_path, tokenizer=Failing())
    assert names(tmp_path) == OF_MODEL


# Generation


def test_any_model_runs_the_mode_of_a_repository(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    export(model, tmp_path / "hogwild")
    other = copy.deepcopy(tiny.build("qwen3"))
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    given = {"max_new_tokens": 8, "tokenizer": tokenizer}
    custom = {"custom_generate": str(tmp_path / "hogwild"), "trust_remote_code": True}
    found = other.generate(ids, **custom, **given)
    assert torch.equal(found, other.generate(ids, generation_mode="hogwild", **SETTINGS, **given))
    assert len(found) == 3
    assert len(other.generate(ids, num_workers=2, **custom, **given)) == 2
    assert len(other.generate(ids, parallel_config={"num_workers": 4}, **custom, **given)) == 4
    other.generation_config.generation_mode = "shared_prefix"
    assert torch.equal(other.generate(ids, **custom, **given), found)
    with pytest.raises(ValueError, match="generation_mode must be 'hogwild', .* got 'pdos'"):
        generate_as("hogwild", {}, other, (ids,), {"generation_mode": "pdos"})


# Uploads

LOAD = """
import json
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

assert "hf_parallel" not in sys.modules
folder, working, *examples = sys.argv[1:]
found = {}
for source in (folder, "somebody/with-model"):
    model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = tokenizer("Oslo or Rome?", return_tensors="pt").input_ids
    stored = model.generation_config
    tokens = model.generate(ids, tokenizer=tokenizer, max_new_tokens=8).tolist()
    found[source] = [stored.generation_mode, stored.parallel_config, tokens]
plain = AutoModelForCausalLM.from_pretrained(folder)
found["plain"] = plain.generate(ids, max_new_tokens=8).tolist()
custom = {"custom_generate": "others/settings", "trust_remote_code": True}
found["custom"] = plain.generate(ids, tokenizer=tokenizer, max_new_tokens=8, **custom).tolist()
pipe = pipeline("parallel-text-generation", model=working + "/pipe", trust_remote_code=True, max_new_tokens=8)
found["pipe"] = pipe("Oslo or Rome?")[0]["workers"]
for code in examples:
    exec(code, {})
json.dump(found, sys.stdout)
"""
"""A process that imports transformers alone."""


def run(code: str, hub: Hub, folder: Path, *arguments: str) -> str:
    """Run code in a new process that uses a Hub. Return its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder / "home"), "HF_TOKEN": "hf_none"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment |= {"HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def example(card: str) -> str:
    """Return the code of a README."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", card, flags=re.DOTALL | re.MULTILINE)
    return code


@pytest.mark.slow
def test_an_uploaded_model_generates_the_same_where_only_transformers_is_imported(
    model: Any, tokenizer: Any, tmp_path: Path, local_hub: Hub
) -> None:
    folder = str(export(model, tmp_path / "exported", tokenizer=tokenizer))
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    for _ in range(2):  # the second upload finds the repository of the first
        info = hf_parallel.hub.push_to_hub(loaded, "with-model", tokenizer=tokenizer, commit_message="all of it")
    assert info.commit_url.startswith(local_hub.endpoint + "/somebody/with-model/commit/")
    hf_parallel.hub.push_to_hub(HogwildConfig(num_workers=2), "others/settings", private=True)
    pipe = pipeline("parallel-text-generation", model=loaded, tokenizer=tokenizer, max_new_tokens=8)
    pipe.save_pretrained(str(tmp_path / "pipe"))
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    hf_parallel.enable(model)
    expected = model.generate(ids, tokenizer=tokenizer, max_new_tokens=8).tolist()
    uploaded = local_hub.files("somebody/with-model")
    assert set(uploaded) >= names(Path(folder))
    assert set(local_hub.files("others/settings")) == OF_CONFIG
    assert '"somebody/with-model"' in uploaded[CARD].decode()
    examples = [example(local_hub.files(name)[CARD].decode()) for name in ("somebody/with-model", "others/settings")]
    examples[1] = examples[1].replace(hf_parallel.hub.EXAMPLE_MODEL, "somebody/with-model")
    printed = run(LOAD, local_hub, tmp_path, folder, str(tmp_path), *examples).splitlines()
    assert sum(line.startswith("Plan a day in Rome") for line in printed) == 3 + 2
    assert printed.count('Alice, Bob, Carol: "talk"') == 3
    found = json.loads(printed[-1])
    assert found[folder] == found["somebody/with-model"] == ["hogwild", SETTINGS, expected]
    plain = hf_parallel.enable(copy.deepcopy(tiny.build("llama")))
    assert found["plain"] == plain.generate(ids, max_new_tokens=8).tolist()
    two = {"num_workers": 2}  # of the repository; all other settings are those of the model's own generation_config
    assert found["custom"] == model.generate(ids, tokenizer=tokenizer, max_new_tokens=8, **two).tolist()
    assert found["pipe"] == pipe(PROMPT)[0]["workers"]


EARLIER = {"model.safetensors", "model.safetensors.index.json", "model-00001-of-00009.safetensors", "notes.safetensors"}


def test_an_upload_keeps_foreign_readmes_and_replaces_weights(model: Any, tmp_path: Path, local_hub: Hub) -> None:
    folder = str(export(model, tmp_path / "exported"))
    local_hub.repositories["somebody/card"] = [{CARD: b"# Mine\n"}]
    for name in ("settings", "whole", "shards"):
        local_hub.repositories[f"somebody/{name}"] = [dict.fromkeys(EARLIER, b"old") | {CARD: CARD_MARK.encode()}]
    for name in ("somebody/card", "somebody/settings"):
        hf_parallel.hub.push_to_hub(HogwildConfig(), name)
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    hf_parallel.hub.push_to_hub(loaded, "somebody/whole")
    loaded.save_pretrained = partial(loaded.save_pretrained, max_shard_size="50KB")
    hf_parallel.hub.push_to_hub(loaded, "somebody/shards")
    assert local_hub.files("somebody/card")[CARD] == b"# Mine\n"
    assert set(local_hub.files("somebody/card")) == OF_CONFIG
    settings, whole, shards = (local_hub.files(f"somebody/{name}") for name in ("settings", "whole", "shards"))
    assert {len(commits) for commits in local_hub.repositories.values()} == {2}
    for files in (settings, whole, shards):
        assert files[CARD].decode().startswith("---\nlibrary_name: transformers")
    assert set(settings) == OF_CONFIG | EARLIER
    assert set(whole) == OF_MODEL | {"notes.safetensors"}
    index = "model.safetensors.index.json"
    parts = set(json.loads(shards[index])["weight_map"].values())
    assert len(parts) > 1
    assert set(shards) == OF_MODEL - {"model.safetensors"} | {index, *parts, "notes.safetensors"}
    assert b"old" not in {whole["model.safetensors"], shards[index]}


# Adapters


def test_an_adapter_is_loaded_with_its_mode_and_generates_the_same(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model.save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    base.generation_config = copy.deepcopy(model.generation_config)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False, lora_alpha=64)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(base, lora).eval()
    folder = export(adapted, tmp_path / "exported")
    assert names(folder) >= OF_CONFIG | {"adapter_config.json", "adapter_model.safetensors", "generation_config.json"}
    assert "model.safetensors" not in names(folder)
    assert "hf_parallel.hub.load" in example((folder / CARD).read_text(encoding="utf-8"))
    given = {"input_ids": tokenizer(PROMPT, return_tensors="pt")["input_ids"], "tokenizer": tokenizer}
    expected = hf_parallel.enable(adapted).generate(**given, max_new_tokens=8)
    loaded = hf_parallel.hub.load(folder)
    twins = [loaded]
    if Version(peft.__version__) >= Version(MIN_PEFT_VERSION):  # else transformers loads adapters, but saves none
        twins.append(hf_parallel.hub.load(export(loaded, tmp_path / "again")))
    for twin in twins:
        assert twin.generation_config.parallel_config == SETTINGS
        assert torch.equal(twin.generate(**given, max_new_tokens=8), expected)
    with adapted.disable_adapter():
        assert not torch.equal(adapted.generate(**given, max_new_tokens=8), expected)
    adapted.add_adapter("second", lora)
    with pytest.raises(ValueError, match=r"one that is named 'default', got \['default', 'second'\]"):
        export(adapted, tmp_path / "new")
