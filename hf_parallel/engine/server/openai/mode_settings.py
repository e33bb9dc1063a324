"""Settings of a mode and of sampling, from a body. Only settings that are plain JSON data are accepted."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import replace

from hf_parallel.cache.logits import LogitsCache
from hf_parallel.engine import Engine
from hf_parallel.engine.server import logits_cache as server_cache
from hf_parallel.engine.server.errors import APIError
from hf_parallel.engine.server.openai.schema import Body
from hf_parallel.generation.call import vocabulary_size
from hf_parallel.generation.config import ParallelConfig
from hf_parallel.generation.mixin import take_parallel_config
from hf_parallel.generation.modes import SharedPrefixConfig
from hf_parallel.generation.registry import MODES
from hf_parallel.generation.validation import suggestion

SAMPLING = (
    *("top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("repetition_penalty", "no_repeat_ngram_size", "min_new_tokens"),
)
"""Fields of a body that are settings of `generate`, with the same names."""
UNSUPPORTED = (
    *("access_programs", "audio", "background", "background_options", "context_management", "conversation"),
    *("echo", "function_call", "functions", "image", "include", "modalities", "moderation", "prediction", "prompt"),
    *("prompt_cache_options", "suffix", "tool_choice", "tools", "top_logprobs", "verbosity", "web_search_options"),
)
"""Fields of OpenAI that some or all endpoints do not support; values in `NEUTRAL` are accepted."""
NEUTRAL: tuple[object, ...] = (None, False, "", "none", "auto", [], ["text"])
GREEDY_BELOW = 1e-5  # temperatures below are 0: logits divided by them are not finite
MAX_TEXT = 4096
"""Characters of a setting that is text or a list of texts: the modes encode and format them for each prompt."""
MAX_ITEMS = 64  # items of a setting that is a list
COMMON = ("seed", "cuda_graph")  # settings of all modes that a request cannot give as further fields


class SettingsReader:
    """Reads the settings of requests to an engine, within its limits.

    Parameters
    ----------
    engine : Engine
    max_rows : int
        Rows of a request.
    max_tokens : int
        Tokens of a prompt and its answer, and the largest number that a setting may be.
    logits_cache : LogitsCache, optional
        For requests that replay cached logits.
    """

    def __init__(self, engine: Engine, max_rows: int, max_tokens: int, logits_cache: LogitsCache | None = None) -> None:
        self._generation_config = engine.model.generation_config
        self._vocabulary_size = vocabulary_size(engine.model)
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._logits_cache = logits_cache

    def read(self, body: Body) -> tuple[ParallelConfig, dict[str, object]]:
        """Return the config of the mode, and the settings of `generate` for sampling."""
        mode = body.generation_mode
        cls = SharedPrefixConfig if mode is None else MODES.get(mode, SharedPrefixConfig)
        settings = self._mode_settings(body, [server_cache.FIELD] if mode is None else fields_of_requests(cls))
        settings |= server_cache.settings_for(cls, settings, self._logits_cache)
        _check_combinations(body)
        config = self._config(body, cls.mode if mode is None else mode, settings)
        return config, self._sampling(body, config)

    def _mode_settings(self, body: Body, allowed: list[str]) -> dict[str, object]:
        """Return the further fields of a body, which must be settings of its mode."""
        settings = {}
        for name, value in (body.model_extra or {}).items():
            if name in UNSUPPORTED:
                if value not in NEUTRAL:
                    raise APIError(400, f"{name} is not supported", name)
            elif name not in allowed:
                raise _unknown_field(body, name, allowed)
            elif value is not None:
                settings[name] = self._plain(name, value)
        return settings

    def _plain(self, name: str, value: object) -> object:
        """Return a setting, if it holds nothing that would exhaust time or memory."""
        items = value if isinstance(value, list) else [value]
        if len(items) > MAX_ITEMS:
            raise APIError(400, f"{name} may have at most {MAX_ITEMS} items, got {len(items)}", name)
        characters = 0
        for item in items:
            text = json.dumps(item) if isinstance(item, dict) else item
            if isinstance(text, str):
                characters += len(text)
        if characters > MAX_TEXT:
            raise APIError(400, f"{name} may have at most {MAX_TEXT} characters, got {characters}", name)
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int):
                continue
            if abs(item) > self._max_tokens:
                raise APIError(400, f"{name} may be at most {self._max_tokens}, got {item}", name)
        return value

    def _config(self, body: Body, mode: str, settings: dict[str, object]) -> ParallelConfig:
        """Return the config of a mode. A default number of rows that exceeds the limit is lowered."""
        seed = secrets.randbits(62) if body.seed is None else body.seed
        arguments = {"generation_mode": mode, **settings, "seed": seed}
        config = take_parallel_config(self._generation_config, arguments)
        assert config is not None
        rows_setting = config.traits.rows_setting
        if rows_setting in ("", "seed", *settings):
            return config
        excess = config.max_rows_per_prompt - self._max_rows // body.answers
        rows = getattr(config, rows_setting)
        if 0 < excess < rows:
            config = replace(config, **{rows_setting: rows - excess})
        return config

    def _sampling(self, body: Body, config: ParallelConfig) -> dict[str, object]:
        """Return the settings of `generate` that a body names; the model's generation config supplies the rest."""
        preset = {name for name, value in vars(self._generation_config).items() if value is not None}
        preset |= set(config.chosen_preset.generation)
        sampling = {}
        for name in SAMPLING:
            value = getattr(body, name)
            if value is not None:
                sampling[name] = value
        if body.temperature is not None:
            sampling["do_sample"] = body.temperature >= GREEDY_BELOW
        elif "do_sample" not in preset:
            sampling["do_sample"] = True
        if sampling.get("do_sample"):
            if body.temperature is not None:
                sampling["temperature"] = float(body.temperature)
            elif "temperature" not in preset:
                sampling["temperature"] = 1.0
            if "top_k" not in preset:  # transformers' default is 50
                sampling.setdefault("top_k", 0)
        if body.top_p is not None and sampling.get("do_sample", True):
            sampling["top_p"] = body.top_p
        if body.logit_bias:
            sampling["sequence_bias"] = self._bias(body.logit_bias)
        return sampling

    def _bias(self, biases: Mapping[str, float]) -> list[list[object]]:
        """Return `sequence_bias` of `generate` for biases by token id."""
        size = self._vocabulary_size
        sequences: list[list[object]] = []
        for token, bias in biases.items():
            is_number = token.isdecimal() and len(token) < 10 and str(int(token)) == token
            if not is_number or int(token) >= size:
                message = f"logit_bias must map token ids below {size} to numbers, got {token!r}"
                raise APIError(400, message, "logit_bias")
            sequences.append([[int(token)], float(bias)])
        return sequences


def fields_of_requests(cls: type[ParallelConfig]) -> list[str]:
    """Return the settings of a mode that a request may have as further fields."""
    excluded = (*COMMON, *cls.not_remote())
    return [name for name in cls.fields() if name not in excluded]


def _unknown_field(body: Body, name: str, allowed: list[str]) -> APIError:
    """Return the error for a field that a request does not have."""
    modes = [mode for mode, cls in MODES.items() if name in fields_of_requests(cls)]
    if modes:
        hint = f"; it is a setting of the generation_mode {' or '.join(modes)}"
    else:
        hint = suggestion(name, (*allowed, *type(body).model_fields))
    return APIError(400, f"{name} is no field of this request{hint}", name)


def _check_combinations(body: Body) -> None:
    """Raise an error for fields that contradict each other."""
    if body.max_tokens == 0 and not getattr(body, "echo", False):
        raise APIError(400, "max_tokens=0 needs echo=true", "max_tokens")
    if body.prompt_logprobs is not None and body.stream:
        raise APIError(400, "prompt_logprobs are not streamed: leave out stream", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise APIError(400, "stream_options needs stream=true", "stream_options")
