"""Training runs on layouts: `Trainer` and TRL's `SFTTrainer`, LoRA, several processes, checkpoints."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from forkserver import start_ranks, wait
from small_tokenizers import make
from test_training import COMPLETIONS, PROMPT, hogwild, mean_loss
from transformers import Trainer, TrainingArguments

import hf_parallel
from hf_parallel.training import DataCollatorForParallel, ParallelExample, prepare_model

pytestmark = [pytest.mark.filterwarnings("ignore")]

TOKENIZER = make("split_marker")


def make_examples() -> list[ParallelExample]:
    """Return eight examples of different lengths: workers, branches, trees."""
    model = hf_parallel.enable(copy.deepcopy(tiny.build("llama")))
    workers = [hogwild(model, max_new_tokens=n, seed=n)[0] for n in (4, 8, 12)]
    texts = [f"Look.\n####a:{'x' * n}\n####b: yes\n####%%%%\nSo." for n in (2, 9, 5)]
    branches = [ParallelExample.from_text(text, TOKENIZER, "pdos", prompt="Q: ") for text in texts]
    trees = [ParallelExample.from_tree([PROMPT.tolist()] * n, [c.tolist() for c in COMPLETIONS[:n]]) for n in (2, 5)]
    return [workers[0], branches[0], trees[0], workers[1], branches[1], trees[1], workers[2], branches[2]]


@pytest.fixture(scope="module")
def examples() -> list[ParallelExample]:
    return make_examples()


@pytest.fixture(scope="module")
def expected(examples: list[ParallelExample], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Loss and norm of the gradients of two steps with all examples in one batch."""
    return train(tmp_path_factory.mktemp("expected"), examples, per_device_train_batch_size=8)


def make_model() -> Any:
    return prepare_model(hf_parallel.enable(copy.deepcopy(tiny.build("llama"))))


def arguments(folder: Path, **settings: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "remove_unused_columns": False,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
    }
    return {**defaults, **settings}


def train(
    folder: Path, dataset: Any, model: Any = None, collator: Any = None, resume: bool = False, **settings: Any
) -> list[dict[str, float]]:
    """Train a tiny model; return loss and norm of the gradients of each step."""
    model = make_model() if model is None else model
    callbacks = [settings.pop("callback")] if "callback" in settings else None
    trainer = Trainer(
        model,
        TrainingArguments(**arguments(folder, **settings)),
        train_dataset=dataset,
        data_collator=collator or DataCollatorForParallel(TOKENIZER),
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=resume)
    return [{name: log[name] for name in ("loss", "grad_norm")} for log in trainer.state.log_history if "loss" in log]


def assert_equal(some: list[dict[str, float]], others: list[dict[str, float]], tolerance: float = 1e-4) -> None:
    assert len(some) == len(others) > 0
    for one, other in zip(some, others, strict=True):
        assert one == pytest.approx(other, rel=tolerance)


def test_the_loss_of_a_step_is_the_mean_over_all_generated_tokens(
    tmp_path: Path, examples: list[ParallelExample]
) -> None:
    [step] = train(tmp_path, examples, max_steps=1, per_device_train_batch_size=8)
    expected = mean_loss(hf_parallel.enable(copy.deepcopy(tiny.build("llama"))), examples)
    assert step["loss"] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": 8, "dataloader_num_workers": 1},
        {"per_device_train_batch_size": 8, "gradient_checkpointing": True},
    ],
    ids=["accumulation", "workers", "checkpointing"],
)
def test_how_a_batch_is_computed_does_not_change_the_loss(
    tmp_path: Path, examples: list[ParallelExample], expected: Any, settings: dict[str, Any]
) -> None:
    assert expected[1]["loss"] < expected[0]["loss"]
    assert_equal(train(tmp_path, examples, **settings), expected)


def test_packed_examples_give_the_loss_of_padded_ones(
    tmp_path: Path, examples: list[ParallelExample], expected: Any
) -> None:
    collator = DataCollatorForParallel(TOKENIZER, packing=True, max_length=260)
    batch = collator(examples)
    assert len(batch["input_ids"]) < len(examples)
    assert int(batch["attention_mask"].sum()) == sum(len(e.with_one_target_each()) for e in examples)
    assert_equal(train(tmp_path, examples, collator=collator, per_device_train_batch_size=8), expected)


def test_a_lora_adapter_learns_from_layouts(tmp_path: Path, examples: list[ParallelExample]) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make_model(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    before = {name: value.clone() for name, value in model.named_parameters()}
    steps = train(tmp_path, examples, model=model, max_steps=4, per_device_train_batch_size=8)
    assert steps[-1]["loss"] < steps[0]["loss"]
    changed = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert changed
    assert all("lora" in name for name in changed)


TEXTS = [
    {"prompt": "Q: ", "completion": "Look.\n####a: x\n####b: yes\n####%%%%\nSo."},
    {"prompt": "Why? ", "completion": "Two.\n####one: it is so\n####two: no\n####%%%%\nEnd."},
]


@pytest.mark.parametrize(
    "kind", ["texts", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("examples", "dicts"))]
)
def test_the_trainer_of_trl_gives_the_losses_of_trainer(
    tmp_path: Path, examples: list[ParallelExample], kind: str
) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    collator = DataCollatorForParallel(TOKENIZER, "pdos")
    if kind == "texts":
        dataset = datasets.Dataset.from_list(TEXTS)
    else:
        dataset = datasets.Dataset.from_list([e.to_dict() for e in examples], features=ParallelExample.features())
    expected = train(tmp_path, examples if kind == "examples" else dataset, collator=collator, seed=1)
    config = trl.SFTConfig(**arguments(tmp_path, seed=1, dataset_kwargs={"skip_prepare_dataset": True}))
    trainer = trl.SFTTrainer(
        make_model(), config, train_dataset=dataset, data_collator=collator, processing_class=TOKENIZER
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert_equal([{name: log[name] for name in ("loss", "grad_norm")} for log in logs], expected)


def train_on_rank(folder: str) -> None:
    torch.set_num_threads(1)
    steps = train(Path(folder), make_examples(), per_device_train_batch_size=4)
    (Path(folder) / f"steps.{os.environ['RANK']}").write_text(json.dumps(steps))


@pytest.mark.slow
def test_two_processes_give_the_loss_of_one(tmp_path: Path, expected: Any) -> None:
    wait(start_ranks(2, train_on_rank, str(tmp_path)))
    assert_equal(json.loads((tmp_path / "steps.0").read_text()), expected)
