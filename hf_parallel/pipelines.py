"""`pipeline("parallel-text-generation")`: prompts and chats as text in, what a mode wrote as plain data out.

transformers' text-generation pipeline does templates, tokens, batches and datasets; this subclass of it names the mode,
applies the mode's prompt helper, and hands on what the mode tells besides tokens. `import hf_parallel` registers it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from types import GeneratorType
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GenerationConfig, PreTrainedModel
from transformers.pipelines.text_generation import Chat, ReturnType, TextGenerationPipeline
from transformers.utils.chat_template_utils import is_valid_message

from hf_parallel.generation import ParallelConfig, ParallelOutput, enable
from hf_parallel.generation.config import check_bool
from hf_parallel.generation.mixin import take_parallel_config

# By their full names: `save_pretrained` puts a copy of this file beside the model, where it is loaded from.
from hf_parallel.generation.modes.hogwild.config import HogwildOutput
from hf_parallel.generation.prompts import render

TASK = "parallel-text-generation"


class ParallelTextGenerationPipeline(TextGenerationPipeline):
    """Text generation in a mode, with what the mode tells besides the text.

    Parameters
    ----------
    model : PreTrainedModel
        Is enabled, see `hf_parallel.enable`.
    generation_mode : str, optional
        Name of the mode. Default: the one that the model's `generation_config` names, or plain generation.
    prompt_helper : bool
        Whether prompts go through the mode's prompt helper, if it has one: a string as `hogwild_prompt` and
        `pdos_prompt` take it; in a chat, what they tell the model goes into its system message. Default: True. Without,
        and in modes that have none, strings are taken as they are and chats through the chat template alone.
    **kwargs
        Settings of the mode (`num_workers` is hogwild's in hogwild, and elsewhere the data loader's), arguments of
        `generate`, and all that transformers' text-generation pipeline takes. Each may be given in a call too. A call
        that names another mode or gives a `parallel_config` puts the settings given here aside.

    Notes
    -----
    A list is one batch, hence one call of `generate` that computes what its prompts share once; `batch_size` cuts it.
    Datasets, their columns and generators go one by one unless `batch_size` is given. Defaults are those of `generate`,
    but for `max_new_tokens`, which is 256 where neither the caller nor the model says.

    Each prompt gives a list of dictionaries of plain data, which `json` can write: one for each returned sequence,
    `generated_text` first (or `generated_token_ids` with `return_tensors=True`). Beside it stands what the mode's
    output knows of the prompt, under the names that it has there (`answers`, `titles`, `blocks`, ...), and `stats` of
    the call that the prompt was part of. `hogwild` gives one dictionary: `generated_text` is the prompt and the
    transcript (`return_full_text=False`: the transcript alone), `workers` are the texts (with `return_tensors=True`
    `generated_token_ids` the tokens) of its workers.

    Examples
    --------
    >>> pipe = pipeline("parallel-text-generation", model="Qwen/Qwen3-8B", generation_mode="hogwild", num_workers=2)
    >>> (result,) = pipe("Plan a day in Rome for six friends.", max_new_tokens=512)
    >>> result["generated_text"], result["workers"], result["answers"], result["stats"]["forward_passes"]

    Raises
    ------
    UnsupportedModelError
        If block attention cannot serve the model.
    ValueError
        For unknown or contradictory settings of the mode, and for what is neither a prompt nor holds prompts.
    """

    _default_generation_config = GenerationConfig(max_new_tokens=256)

    def __init__(self, model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        enable(model)
        self._generation_config = kwargs.get("generation_config")
        given = dict(kwargs)
        config = take_parallel_config(model.generation_config, kwargs)
        self._mode = None if config is None else config.mode
        self._settings = {name: given[name] for name in given.keys() - kwargs.keys()}
        tokenizer = kwargs.get("tokenizer")
        if tokenizer is not None and tokenizer.pad_token_id is None:  # as `generate` does, and a batch needs one
            tokenizer.pad_token = tokenizer.eos_token
        super().__init__(model, *args, **kwargs)

    def __call__(self, text_inputs: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Complete prompts: strings, chats, lists, columns, datasets or generators of either; see the class."""
        config = self._take_config(kwargs)
        text_inputs = _as_inputs(text_inputs)
        if isinstance(text_inputs, list):
            if not text_inputs:
                return []
            if config is not None:
                kwargs.setdefault("batch_size", self._batch_size or len(text_inputs))
        return super().__call__(text_inputs, parallel_config=config, **kwargs)

    def _take_config(self, kwargs: dict[str, Any]) -> ParallelConfig | None:
        """Take the mode and its settings out of a call's arguments, and fill in those of the pipeline."""
        stored = getattr(kwargs.get("generation_config"), "generation_mode", None)
        asked = kwargs.get("generation_mode", stored or self._mode)
        replaced = "parallel_config" in kwargs or asked != self._mode
        defaults: dict[str, Any] = {"generation_config": self._generation_config}
        arguments = {**defaults, **({} if replaced else self._settings), **kwargs}
        config = take_parallel_config(self.model.generation_config, arguments)
        for name in kwargs.keys() - arguments.keys():
            del kwargs[name]
        return config

    def _sanitize_parameters(  # type: ignore[override]
        self, prompt_helper: bool | None = None, parallel_config: ParallelConfig | None = None, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        preprocess, forward, postprocess = super()._sanitize_parameters(**kwargs)
        if prompt_helper is not None:
            check_bool("prompt_helper", prompt_helper)
            preprocess["prompt_helper"] = prompt_helper
        preprocess["parallel_config"] = parallel_config
        forward |= {"generation_mode": None} if parallel_config is None else self._mode_arguments(parallel_config)
        return preprocess, forward, postprocess

    def _mode_arguments(self, config: ParallelConfig) -> dict[str, Any]:
        return {"generation_mode": config.mode, "parallel_config": config, "tokenizer": self.tokenizer}

    def preprocess(  # type: ignore[override]
        self,
        prompt_text: Any,
        prompt_helper: bool = True,
        parallel_config: ParallelConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """Text or chat into tokens, through the mode's prompt helper."""
        if isinstance(prompt_text, list | tuple) and prompt_text and all(map(is_valid_message, prompt_text)):
            prompt_text = Chat(prompt_text)  # type: ignore[arg-type] # out of a dataset
        if not isinstance(prompt_text, str | Chat):
            raise _not_taken(prompt_text)
        rules = None if parallel_config is None or not prompt_helper else parallel_config.system_prompt()
        if rules is None:
            return super().preprocess(prompt_text, **kwargs)
        task: Any = prompt_text
        template: dict[str, Any] = {}
        if isinstance(prompt_text, Chat):
            task = prompt_text.messages
            template = {name: kwargs.pop(name, None) for name in ("tools", "documents", "continue_final_message")}
        if getattr(self.tokenizer, "chat_template", None):
            template |= kwargs.pop("tokenizer_encode_kwargs", None) or {}
            kwargs["add_special_tokens"] = False  # the template has written them
        inputs = super().preprocess(render(rules, task, self.tokenizer, **template), **kwargs)
        inputs["prompt_text"] = prompt_text
        return inputs

    def _forward(self, model_inputs: Any, **generate_kwargs: Any) -> Any:  # type: ignore[override]
        if generate_kwargs.get("parallel_config") is None:
            return super()._forward(model_inputs, **generate_kwargs)
        asking: Any = copy.copy(self)  # the stock pipeline hands on tensors alone: let it ask a model that keeps all
        asking.model = model = _Keeping(self.model)
        outputs = super(ParallelTextGenerationPipeline, asking)._forward(model_inputs, **generate_kwargs)
        if not isinstance(model.output, ParallelOutput):
            return outputs
        told = _in_groups(list(answer_records(model.output)), len(outputs["generated_sequence"]))
        outputs["told"] = told if isinstance(outputs["prompt_text"], list) else told[0]
        return outputs

    def postprocess(self, model_outputs: Any, **kwargs: Any) -> list[dict[str, Any]]:  # type: ignore[override]
        """Tokens into text, with what the mode told."""
        records = super().postprocess(model_outputs, **kwargs)
        if "told" not in model_outputs:
            return records
        told = model_outputs["told"]
        if "workers" in told[0]:  # rows are those of workers
            prompt, rows = model_outputs["prompt_text"], _in_groups(records, len(told))
            pairs = zip(rows, told, strict=True)
            records = [_transcript(written, answer["transcripts"], prompt, **kwargs) for written, answer in pairs]
        return [{**record, **answer} for record, answer in zip(records, told, strict=True)]


class _Rows(Dataset):
    """A sequence, such as a column of a `datasets.Dataset`, as a dataset that the stock pipeline knows as one."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def _as_inputs(given: Any) -> Any:
    """What a call was given, as something that the stock pipeline takes."""
    if isinstance(given, tuple):
        return list(given)
    if isinstance(given, str | Chat | list | Dataset | GeneratorType):
        return given
    if isinstance(given, Sequence) and not isinstance(given, bytes):
        return _Rows(given)
    raise _not_taken(given)


def _not_taken(given: Any) -> ValueError:
    return ValueError(
        "prompts must be a string, a chat of messages with role and content, or a list, a column, a dataset or a "
        "generator of either; of a dataset whose rows are dictionaries, give one column: dataset['text'], or "
        f"KeyDataset(dataset, 'text') of transformers.pipelines.pt_utils. Got {given!r}"
    )


class _Keeping:
    """A model that keeps all that it knows of what it generated last."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.output: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def generate(self, generation_config: GenerationConfig | None = None, **kwargs: Any) -> Any:
        """Generate; what was not asked for is kept back."""
        if generation_config is None:
            asked = kwargs.get("return_dict_in_generate")
            kwargs["return_dict_in_generate"] = True
        else:
            asked = generation_config.return_dict_in_generate
            generation_config = copy.deepcopy(generation_config)
            generation_config.return_dict_in_generate = True
        self.output = self.model.generate(generation_config=generation_config, **kwargs)
        return self.output if asked or isinstance(self.output, torch.Tensor) else self.output.sequences


def answer_records(output: ParallelOutput) -> Iterator[dict[str, Any]]:
    """What an output says beyond tokens of each row, or of each prompt's workers together, as plain data."""
    told = {name: getattr(output, name) for name in _names(type(output))}
    answers = len(output.sequences)
    if isinstance(output, HogwildOutput):
        answers = len(told["transcripts"])
        told = {"workers": _in_groups(told.pop("texts"), answers), **told}
    for index in range(answers):
        record = {name: value[index] if isinstance(value, list) else value for name, value in told.items()}
        yield {name: _plain(value) for name, value in {**record, "stats": output.stats}.items()}


def _in_groups(items: list[Any], count: int) -> list[list[Any]]:
    """Items in `count` runs of equal length."""
    each = len(items) // count
    return [items[i * each : (i + 1) * each] for i in range(count)]


def _names(cls: type[ParallelOutput]) -> list[str]:
    """What a mode's outputs have that the outputs of all modes have not."""
    common = {field.name for field in dataclasses.fields(ParallelOutput)}
    fields = [field.name for field in dataclasses.fields(cls) if field.name not in common]
    return fields + [name for name, value in vars(cls).items() if isinstance(value, property)]


def _plain(value: Any) -> Any:
    """The same as dictionaries, lists, texts and numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _transcript(
    records: list[dict[str, Any]],
    text: str,
    prompt: Any,
    return_type: ReturnType = ReturnType.FULL_TEXT,
    continue_final_message: bool | None = None,
    **_: Any,
) -> dict[str, Any]:
    """One record for all workers of a prompt, in the form of those of the rows."""
    if return_type is ReturnType.TENSORS:
        return {"generated_token_ids": [record["generated_token_ids"] for record in records]}
    if return_type is ReturnType.NEW_TEXT:
        return {"generated_text": text}
    if isinstance(prompt, str):
        return {"generated_text": prompt + text}
    *before, last = prompt.messages
    continued = last["role"] == "assistant" if continue_final_message is None else continue_final_message
    if continued:
        return {"generated_text": [*before, {**last, "content": last["content"] + text}]}
    return {"generated_text": [*before, last, {"role": "assistant", "content": text}]}
