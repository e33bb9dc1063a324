"""Tiny configurations of the tested architectures, with all of their features enabled.

`tiny.build` creates models from them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from transformers import AutoConfig, PreTrainedConfig

VOCAB_SIZE = 128
PAD, BOS, EOS = 0, 1, 2
MAX_POSITIONS = 512
SLIDING_WINDOW = 16

ConfigFactory = Callable[[], PreTrainedConfig]
Positions = Literal["rotary", "learned", "relative", "none"]


@dataclass(frozen=True)
class Architecture:
    """A tiny model: its config and facts that tests need. `notes`: where it is unusual or transformers disagrees."""

    name: str  # the `model_type`, with a suffix for a RoPE variant (`llama-yarn`)
    config: ConfigFactory
    positions: Positions = "rotary"
    sliding_window: int | None = None  # tokens, of the layers that have one
    attn_implementation: str | None = "sdpa"  # exact for this architecture; None: the default of its class
    attention_gain: float = 2.0  # scales of the random weights: see `draw_weights`
    embedding_std: float = 0.5
    head_gain: float = 2.0
    slow_states: bool = False  # states keep distant tokens, which matters where no layer has full attention
    seed: int = 0  # added to that of `build` if the weights of seed 0 are degenerate
    notes: str = ""


_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "attention_dropout": 0.0,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_FOUR_LAYERS = {"num_hidden_layers": 4}
_WINDOW = {**_FOUR_LAYERS, "sliding_window": SLIDING_WINDOW}
_ALTERNATING = {**_WINDOW, "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL]}
_UPPER_SLIDING = {**_WINDOW, "use_sliding_window": True, "max_window_layers": 2}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_LATENT_EXPERTS = {
    **_LATENT,
    **_EXPERTS,
    **_FOUR_LAYERS,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "num_mtp_layers": 0,
}
_ROUTED = {**_EXPERTS, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "head_dim": 16}
_SHARED_KEYS = {
    **_WINDOW,
    "num_hidden_layers": 6,
    "layer_types": 3 * [_SLIDING, _FULL],
    "head_dim": 16,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
_WIDE_HEADS = {
    **_ALTERNATING,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
}
_DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
_YARN = {**_DEFAULT, "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
_LLAMA3 = {**_YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
    "long_factor": [1.0 + pair for pair in range(8)],
    "original_max_position_embeddings": 256,
}
_FREQUENCIES_CHANGE = (
    "Frequencies change past {} positions, and cached keys keep the old ones: there stock generate disagrees with a "
    "forward pass over the whole row."
)


def _architecture(
    name: str, settings: dict[str, Any] | None = None, *, without: Collection[str] = (), **facts: Any
) -> Architecture:
    """Return an architecture with the config `_COMMON | settings`, less the keys that its class does not have."""
    merged = {key: value for key, value in {**_COMMON, **(settings or {})}.items() if key not in without}
    config = partial(_make_config, name.split("-")[0], merged)
    return Architecture(name, config, sliding_window=merged.get("sliding_window"), **facts)


def _make_config(model_type: str, settings: dict[str, Any]) -> PreTrainedConfig:
    # Config classes write defaults into the dictionaries and lists that they receive.
    return AutoConfig.for_model(model_type, **copy.deepcopy(settings))


def _by_name(*architectures: Architecture) -> dict[str, Architecture]:
    return {architecture.name: architecture for architecture in architectures}


ARCHITECTURES: dict[str, Architecture] = _by_name(
    _architecture("llama"),
    _architecture("llama-linear", {"rope_parameters": {**_DEFAULT, "rope_type": "linear", "factor": 4.0}}),
    _architecture("llama-yarn", {"rope_parameters": _YARN}),
    _architecture("llama-llama3", {"rope_parameters": _LLAMA3}),
    _architecture(
        "llama-dynamic",
        {"rope_parameters": {**_DEFAULT, "rope_type": "dynamic", "factor": 2.0}},
        notes=_FREQUENCIES_CHANGE.format(MAX_POSITIONS),
    ),
    _architecture("llama-longrope", {"rope_parameters": _LONGROPE}, notes=_FREQUENCIES_CHANGE.format(256)),
    _architecture("mistral", _WINDOW, seed=3),
    _architecture("mixtral", {**_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    _architecture("qwen2", _UPPER_SLIDING, seed=4),
    _architecture("qwen3", {**_UPPER_SLIDING, "head_dim": 32}),
    _architecture(
        "qwen3_moe",
        {**_WINDOW, **_EXPERTS, "use_sliding_window": True, "num_experts": 4, "norm_topk_prob": True, "head_dim": 16},
    ),
    _architecture("phi", attention_gain=4.0),
    _architecture(
        "phi3",
        {**_WINDOW, "hidden_size": 96, "partial_rotary_factor": 0.75},
        notes="head_dim 24, of which 18 are rotated: not a power of two.",
    ),
    _architecture("glm", {"head_dim": 16}),
    _architecture("glm4", {"head_dim": 16}, seed=1),
    _architecture(
        "granite",
        {
            "embedding_multiplier": 2.0,
            "logits_scaling": 0.5,
            "residual_multiplier": 0.8,
            "attention_multiplier": 0.3,
        },
        seed=1,
        notes="Scores are scaled by attention_multiplier 0.3, not by head_dim ** -0.5 = 0.25.",
    ),
    _architecture("olmo2"),
    _architecture(
        "olmo3",
        {**_ALTERNATING, "rope_parameters": {_FULL: _YARN, _SLIDING: _DEFAULT}},
        notes="Full layers use YaRN, sliding layers plain RoPE: two rotary tables.",
    ),
    _architecture(
        "smollm3",
        {
            **_WINDOW,
            "use_sliding_window": True,
            "no_rope_layers": [1, 0, 1, 0],
            "layer_types": [_FULL, _FULL, _SLIDING, _SLIDING],
        },
        seed=1,
        notes="Layers 1 and 3 have no RoPE, layers 2 and 3 slide: all four combinations.",
    ),
    _architecture("cohere", {"logit_scale": 1.0, "use_qk_norm": True}),
    _architecture("cohere2", {**_ALTERNATING, "logit_scale": 1.0}, notes="Full layers have no RoPE."),
    _architecture("gemma", {"head_dim": 32}, embedding_std=0.1),
    _architecture(
        "gemma2",
        {
            **_ALTERNATING,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 10.0,
        },
        attn_implementation="eager",
        attention_gain=3.0,
        embedding_std=0.03,
        notes="sdpa cannot soft-cap.",
    ),
    _architecture(
        "gemma3_text",
        {
            **_ALTERNATING,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                _FULL: {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                _SLIDING: _DEFAULT,
            },
        },
        embedding_std=0.1,
        notes="Full layers use scaled RoPE with another base: two rotary tables.",
    ),
    _architecture(
        "starcoder2",
        {**_WINDOW, "residual_dropout": 0.0, "embedding_dropout": 0.0},
        attention_gain=4.0,
        embedding_std=0.25,
    ),
    _architecture(
        "gpt_oss",
        {
            **_ALTERNATING,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {**_YARN, "truncate": False},
        },
        attn_implementation="eager",
        seed=2,
        notes="sdpa has no attention sinks.",
    ),
    _architecture(
        "gpt2",
        {"n_inner": 128, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        without=("num_key_value_heads", "intermediate_size", "attention_dropout"),
        positions="learned",
        attention_gain=2.5,
        seed=2,
    ),
    _architecture("gpt_neox", without=("num_key_value_heads",), attention_gain=2.5, seed=2),
    _architecture(
        "opt",
        {"ffn_dim": 128, "dropout": 0.0},
        without=("num_key_value_heads", "intermediate_size"),
        positions="learned",
        attention_gain=4.0,
        seed=4,
    ),
    _architecture("exaone4", _ALTERNATING, notes="Full layers have no RoPE."),
    _architecture("ernie4_5", {"head_dim": 16}, without=("attention_dropout",)),
    _architecture("hunyuan_v1_dense", {"head_dim": 16, "eod_token_id": 3}),
    _architecture("seed_oss", {"head_dim": 16, "residual_dropout": 0.0}),
    _architecture(
        "ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {
                **_YARN,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            },
        },
        notes="Queries are scaled by a step function of their position, from 16 on.",
    ),
    _architecture("apertus", {"rope_parameters": _LLAMA3}),
    _architecture("arcee", seed=4),
    _architecture("helium", {"head_dim": 16}),
    _architecture("persimmon", without=("num_key_value_heads",), attention_gain=2.25, seed=4),
    _architecture("bitnet", seed=2),
    _architecture("stablelm", seed=2),
    _architecture("nemotron", {"head_dim": 16}),
    _architecture("deepseek_v2", {**_LATENT_EXPERTS, "topk_method": "group_limited_greedy"}, seed=1),
    _architecture(
        "deepseek_v3",
        _LATENT_EXPERTS,
        notes="Latents of 16; keys of 24 dimensions, of which the last 8 are rotated and cached apart, values of 16.",
    ),
    _architecture("glm4_moe_lite", _LATENT_EXPERTS),
    _architecture("minicpm3", {**_LATENT, "scale_emb": 2, "dim_model_base": 64}, seed=2),
    _architecture("youtu", _LATENT, seed=1),
    _architecture("axk1", _LATENT_EXPERTS),
    _architecture(
        "longcat_flash",
        {
            **_LATENT,
            "head_dim": 8,
            "ffn_hidden_size": 64,
            "expert_ffn_hidden_size": 32,
            "n_routed_experts": 4,
            "moe_topk": 2,
            "zero_expert_num": 1,
            "num_layers": 2,
        },
        notes="Two attention layers per decoder layer; latents are scaled before they are cached.",
    ),
    _architecture(
        "gemma3n_text",
        {
            **_SHARED_KEYS,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.9, *5 * [0.0]],
        },
        notes="Layers 4 and 5 read the keys of layers 2 and 3.",
    ),
    _architecture(
        "gemma4_text-e2b",
        {**_SHARED_KEYS, "num_key_value_heads": 1, "global_head_dim": 32, "use_double_wide_mlp": True},
        notes="Layers 4 and 5 read the keys of layers 2 and 3; heads of full layers are wider, a quarter is rotated.",
    ),
    _architecture("gemma4_text-e4b", {**_SHARED_KEYS, "global_head_dim": 32}),
    _architecture(
        "gemma4_text-26b",
        {**_WIDE_HEADS, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
        notes="Full layers have other numbers and sizes of KV heads, and values that are their keys before RoPE.",
    ),
    _architecture("gemma4_text-31b", {**_WIDE_HEADS, "global_head_dim": 512}),
    _architecture(
        "llama4_text",
        {
            **_FOUR_LAYERS,
            "head_dim": 16,
            "intermediate_size_mlp": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_chunk_size": SLIDING_WINDOW,
            "no_rope_layers": [1, 1, 0, 1],
            "attn_temperature_tuning": False,
        },
        notes="Attention in chunks, except in layer 2, which has no RoPE.",
    ),
    _architecture(
        "phimoe",
        {**_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
        notes="The window is in the mask but not in the arguments of attention.",
    ),
    _architecture(
        "mimo_v2_flash",
        {**_ALTERNATING, **_EXPERTS, "n_routed_experts": 4, "head_dim": 24, "v_head_dim": 16},
        attn_implementation="eager",
        notes="Heads of 24 dimensions for keys, 16 for values; sinks.",
    ),
    _architecture("granite_swa", _ALTERNATING, attn_implementation="eager"),
    _architecture("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8}),
    _architecture("glm4_moe", {**_ROUTED, "first_k_dense_replace": 1}),
    _architecture("hy_v3", {**_EXPERTS, "head_dim": 16, "num_experts": 4}),
    _architecture("afmoe", {**_ALTERNATING, **_EXPERTS, "head_dim": 16, "num_experts": 4, "num_dense_layers": 1}),
    _architecture("cohere2_moe", {**_ALTERNATING, **_EXPERTS, "head_dim": 16, "num_experts": 4, "logit_scale": 1.0}),
    _architecture("dots1", {**_ALTERNATING, **_ROUTED, "n_shared_experts": 1, "first_k_dense_replace": 1}),
    _architecture("exaone_moe", {**_ALTERNATING, **_EXPERTS, "head_dim": 16, "num_experts": 4}),
    _architecture("laguna", {**_ALTERNATING, **_EXPERTS, "head_dim": 16, "num_experts": 4}),
    _architecture("solar_open", _ROUTED),
)

REPRESENTATIVE = (
    "llama",
    "phi3",
    "glm",
    "smollm3",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "gpt2",
    "gpt_neox",
    "deepseek_v3",
    "gemma4_text-e2b",
    "llama4_text",
    "phimoe",
)
"""For claims beside the main one of a mode: plain, partial and interleaved RoPE, layers without it, soft-capping,
two rotary tables, sinks and experts, learned positions, a model that drops keyword arguments, latents, layers that
share keys, chunks, windows of the mask."""

REFUSED: dict[str, Architecture] = _by_name(
    _architecture("rwkv", attn_implementation="eager", notes="States in a list of its own."),
    _architecture(
        "xlstm",
        {"num_heads": 4, "num_blocks": 4},
        attn_implementation="eager",
        notes="Its own `generate` fails over the cache of Transformers.",
    ),
    _architecture(
        "qwen4_exp_text",
        {
            **_EXPERTS,
            "layer_types": [_LINEAR, _FULL],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "head_dim": 16,
            "num_experts": 4,
            "shared_expert_intermediate_size": 32,
            "hc_lowrank": 16,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
        },
        notes="A sparse indexer selects the keys of each token in its full attention.",
    ),
    _architecture(
        "t5",
        {
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": PAD,
        },
        without=_COMMON.keys() - {"vocab_size", "pad_token_id", "eos_token_id"},
        positions="relative",
        notes="Encoder and decoder.",
    ),
    _architecture(
        "moshi",
        {"ffn_dim": 128, "head_dim": 16, "sliding_window": SLIDING_WINDOW, "audio_vocab_size": 16, "num_codebooks": 2},
        without=("intermediate_size",),
        notes="Prefill has no window, but the stock cache drops keys: decode steps do not see them.",
    ),
    _architecture(
        "bert-encoder",
        without=("num_key_value_heads", "attention_dropout"),
        positions="learned",
        notes="Not causal.",
    ),
)
