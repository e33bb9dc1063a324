"""`pipeline("parallel-text-generation")`: generates text with a `generation_mode` from strings or chats.

A subclass of transformers' text-generation pipeline, which handles chat templates, tokenization, batching and datasets.
It adds the mode, its prompt builder, and the mode's own output fields. `import hf_parallel` registers it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from types import GeneratorType
from typing import Any, TypeAlias

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.pipelines import PIPELINE_REGISTRY
from transformers.pipelines.pt_utils import PipelineDataset
from transformers.pipelines.text_generation import Chat, ReturnType, TextGenerationPipeline
from transformers.utils.chat_template_utils import is_valid_message

# Absolute imports, as `save_pretrained` copies this file into the model's folder, and it may be loaded from there.
from hf_parallel.generation import ParallelConfig, ParallelOutput, enable
from hf_parallel.generation.mixin import take_parallel_config
from hf_parallel.generation.outputs import grouped
from hf_parallel.generation.prompts import NOT_RENDERED, check_unused_template_kwargs, render_prompt
from hf_parallel.generation.validation import check_bool

Parameters: TypeAlias = dict[str, Any]
"""Keyword arguments, or outputs, of a stage of a pipeline, by name."""
_OF_TOKENIZER = {"max_length", "padding", "truncation"}
"""Arguments in `tokenizer_encode_kwargs` that are for the tokenizer; others are for the chat template."""


class ParallelTextGenerationPipeline(TextGenerationPipeline):
    """Text generation with a `generation_mode`. Results contain the text and the mode's own output fields.

    Parameters
    ----------
    model : PreTrainedModel
        Model that generates. It is passed to `hf_parallel.enable`.
    generation_mode : str, optional
        Name of the mode. Default: `generation_config.generation_mode` of the model, or plain `generate`.
    prompt_helper : bool
        Whether the mode's instructions (`ModePrompt.rules`) are added to prompts, as `build_prompt` does.
        If False, and in modes without instructions, strings are used unchanged, and chats are formatted with the chat
        template only. Default: True.
    chat_template_kwargs : mapping
        Variables of the chat template, such as `{"enable_thinking": False}`. May also be given per call.
    log_probs : bool
        Whether results contain `log_probs`: the log-probability of each new token under the model, None for tokens that
        the mode inserted; in modes that merge rows, a list of each row. May also be given per call. Default: False.
    **kwargs
        Settings of the mode, and arguments of `generate` and of transformers' text-generation pipeline. Each may also
        be given per call. A call that names another mode or passes a `parallel_config` ignores the settings of the
        pipeline. In modes that have no setting `num_workers`, that argument is passed to the `DataLoader`.

    Examples
    --------
    >>> pipe = pipeline("parallel-text-generation", model="Qwen/Qwen3-8B", generation_mode="hogwild", num_workers=2)
    >>> (result,) = pipe("Plan a day in Rome for six friends.", max_new_tokens=512)
    >>> result["generated_text"], result["workers"], result["answer"], result["stats"]["forward_passes"]

    Raises
    ------
    UnsupportedModelError
        If block attention does not support the model.
    ValueError
        For unknown or contradictory settings of the mode, and for inputs that are not prompts.
    """

    _default_generation_config = GenerationConfig(max_new_tokens=256)

    def __init__(self, model: PreTrainedModel, *args: object, **kwargs: Any) -> None:
        enable(model)
        self._generation_config = kwargs.get("generation_config")
        arguments = dict(kwargs)
        config = take_parallel_config(model.generation_config, kwargs)
        self._mode = None if config is None else config.mode
        self._settings = {name: arguments[name] for name in arguments.keys() - kwargs.keys()}
        tokenizer = kwargs.get("tokenizer")
        if tokenizer is not None and tokenizer.pad_token_id is None:  # for padding; `generate` too defaults to eos
            tokenizer.pad_token = tokenizer.eos_token
        super().__init__(model, *args, **kwargs)

    def __call__(self, text_inputs: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Complete prompts: strings, chats, or lists, columns, datasets or generators of either; see the class."""
        config = self._take_config(kwargs)
        text_inputs = _as_inputs(text_inputs)
        if isinstance(text_inputs, list) and not text_inputs:
            return []
        if isinstance(text_inputs, list) and config is not None:
            kwargs.setdefault("batch_size", self._batch_size or len(text_inputs))
        return super().__call__(text_inputs, parallel_config=config, **kwargs)

    def _take_config(self, kwargs: Parameters) -> ParallelConfig | None:
        """Remove the mode and its settings from `kwargs`. Return the config; the pipeline's settings are defaults."""
        stored = getattr(kwargs.get("generation_config"), "generation_mode", None)
        mode = kwargs.get("generation_mode", stored or self._mode)
        replaced = "parallel_config" in kwargs or mode != self._mode
        settings = {} if replaced else self._settings
        arguments = {"generation_config": self._generation_config, **settings, **kwargs}
        config = take_parallel_config(self.model.generation_config, arguments)
        for name in kwargs.keys() - arguments.keys():
            del kwargs[name]
        return config

    def _sanitize_parameters(  # type: ignore[override]
        self,
        prompt_helper: bool | None = None,
        parallel_config: ParallelConfig | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        log_probs: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Parameters, Parameters, Parameters]:
        preprocess, forward, postprocess = super()._sanitize_parameters(**kwargs)
        if prompt_helper is not None:
            check_bool("prompt_helper", prompt_helper)
            preprocess["prompt_helper"] = prompt_helper
        if chat_template_kwargs is not None:
            preprocess["chat_template_kwargs"] = chat_template_kwargs
        if log_probs is not None:
            check_bool("log_probs", log_probs)
            forward["log_probs"] = log_probs
        preprocess["parallel_config"] = parallel_config
        forward["generation_mode"] = None if parallel_config is None else parallel_config.mode
        if parallel_config is not None:
            forward |= {"parallel_config": parallel_config, "tokenizer": self.tokenizer}
        return preprocess, forward, postprocess

    def preprocess(  # type: ignore[override]
        self,
        prompt_text: object,
        prompt_helper: bool = True,
        parallel_config: ParallelConfig | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Encode a string or a chat, with the mode's instructions."""
        if isinstance(prompt_text, list | tuple) and prompt_text and all(map(is_valid_message, prompt_text)):
            prompt_text = Chat(prompt_text)  # type: ignore[arg-type] # from a dataset
        if not isinstance(prompt_text, str | Chat):
            raise _invalid_inputs(prompt_text)
        prompt = None
        if prompt_helper and parallel_config is not None:
            prompt = parallel_config.prompt
        has_rules = prompt is not None and prompt.rules() is not None
        if not has_rules and isinstance(prompt_text, str):
            check_unused_template_kwargs(chat_template_kwargs, NOT_RENDERED)
            return super().preprocess(prompt_text, **kwargs)
        task: Any = prompt_text
        template: dict[str, object] = {}
        if isinstance(prompt_text, Chat):
            task = prompt_text.messages
            kwargs.pop("prefix", None)  # of texts
            for name in ("tools", "documents", "continue_final_message"):
                template[name] = kwargs.pop(name, None)
        if getattr(self.tokenizer, "chat_template", None):
            encode_kwargs: dict[str, object] = {}
            for name, value in (kwargs.pop("tokenizer_encode_kwargs", None) or {}).items():
                (encode_kwargs if name in _OF_TOKENIZER else template)[name] = value
            kwargs["tokenizer_encode_kwargs"] = encode_kwargs
            kwargs["add_special_tokens"] = False  # the template contains them
        text = render_prompt(prompt, task, self.tokenizer, chat_template_kwargs, **template)
        inputs = super().preprocess(text, **kwargs)
        inputs["prompt_text"] = prompt_text
        return inputs

    def _forward(self, model_inputs: dict[str, object], **generate_kwargs: Any) -> Any:  # type: ignore[override]
        config: ParallelConfig | None = generate_kwargs.get("parallel_config")
        log_probs = generate_kwargs.pop("log_probs", False)
        if config is None:
            if log_probs:
                raise ValueError("log_probs=True needs a generation_mode; plain generate has output_logits")
            return super()._forward(model_inputs, **generate_kwargs)
        model = _OutputKeeper(self.model)
        proxy: Any = copy.copy(self)  # the base class drops all fields but tensors
        proxy.model = model
        outputs = super(ParallelTextGenerationPipeline, proxy)._forward(model_inputs, **generate_kwargs)
        if not isinstance(model.output, ParallelOutput):
            return outputs
        is_batch = isinstance(outputs["prompt_text"], list)
        records = grouped(model.output.to_records(log_probs), len(outputs["generated_sequence"]))
        name = "merged_records" if config.traits.merges_rows else "records"
        outputs[name] = records if is_batch else records[0]
        ends = list(model.output.record.end_tokens)
        outputs["end_tokens"] = [ends] * len(records) if is_batch else ends
        return outputs

    def postprocess(self, model_outputs: Parameters, **kwargs: Any) -> list[Parameters]:  # type: ignore[override]
        """Return records with text and the fields of the mode's output."""
        proxy: Any = copy.copy(self)
        proxy.tokenizer = _VisibleText(self.tokenizer, model_outputs.get("end_tokens", ()))
        results = super(ParallelTextGenerationPipeline, proxy).postprocess(model_outputs, **kwargs)
        merged = model_outputs.get("merged_records")
        records = model_outputs.get("records", merged)
        if records is None:
            return results
        if merged is not None:
            prompt = model_outputs["prompt_text"]
            pairs = zip(grouped(results, len(merged)), merged, strict=True)
            results = [_merged(rows, record["transcript"], prompt, **kwargs) for rows, record in pairs]
        return [{**result, **record} for result, record in zip(results, records, strict=True)]


def register() -> None:
    """Register the task with transformers."""
    task = "parallel-text-generation"
    pipeline = ParallelTextGenerationPipeline
    PIPELINE_REGISTRY.register_pipeline(task, pipeline, pt_model=AutoModelForCausalLM, type="text")


def _as_inputs(given: object) -> Any:
    if isinstance(given, tuple):
        return list(given)
    if isinstance(given, str | Chat | list | Dataset | GeneratorType):
        return given
    if isinstance(given, Sequence) and not isinstance(given, bytes):
        return PipelineDataset(given, lambda item: item, {})  # a column of a `datasets.Dataset`
    raise _invalid_inputs(given)


def _invalid_inputs(given: object) -> ValueError:
    return ValueError(
        "prompts must be a string, a chat of messages with role and content, or a list, a column, a dataset or a "
        "generator of either; if the rows of a dataset are dictionaries, pass one column: dataset['text'], or "
        f"KeyDataset(dataset, 'text') of transformers.pipelines.pt_utils. Got {given!r}"
    )


class _OutputKeeper:
    """Wraps a model and keeps its last output, with all fields, in `output`."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.output: ParallelOutput | torch.Tensor | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self.model, name)

    def generate(self, **kwargs: Any) -> object:
        config = copy.deepcopy(kwargs.get("generation_config"))
        kwargs["generation_config"] = config
        settings = kwargs if config is None else vars(config)
        as_dict = settings.get("return_dict_in_generate")
        settings["return_dict_in_generate"] = True
        self.output = self.model.generate(**kwargs)
        if as_dict or isinstance(self.output, torch.Tensor):
            return self.output
        return self.output.sequences


class _VisibleText:
    """Tokenizer that treats the tokens that end a row as special: texts without special tokens leave them out."""

    def __init__(self, tokenizer: Any, end_tokens: Collection[int]) -> None:
        self.tokenizer = tokenizer
        self.end_tokens = end_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool, **kwargs: Any) -> str:
        if skip_special_tokens:
            tokens = [token for token in tokens if token not in self.end_tokens]
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens, **kwargs)
        return text


def _merged(
    rows: list[Parameters],
    text: str,
    prompt: str | Chat,
    return_type: ReturnType = ReturnType.FULL_TEXT,
    continue_final_message: bool | None = None,
    **_: object,
) -> dict[str, object]:
    """Merge the results of a prompt's rows into one with the given text, in the format of the base class."""
    if return_type is ReturnType.TENSORS:
        return {"generated_token_ids": [row["generated_token_ids"] for row in rows]}
    if return_type is ReturnType.NEW_TEXT:
        return {"generated_text": text}
    if isinstance(prompt, str):
        return {"generated_text": prompt + text}
    *earlier, last = prompt.messages
    if continue_final_message is None:
        continue_final_message = last["role"] == "assistant"
    if continue_final_message:
        continued = {**last, "content": last["content"] + text}
        return {"generated_text": [*earlier, continued]}
    return {"generated_text": [*earlier, last, {"role": "assistant", "content": text}]}


if __name__ == "hf_parallel.pipelines":  # not in the copy that `save_pretrained` makes
    register()
