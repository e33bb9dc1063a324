"""Tiny configurations of models whose layers keep a state: hybrids, and models without any attention."""

from __future__ import annotations

from functools import partial
from typing import Any

from architectures import BOS, EOS, MAX_POSITIONS, PAD, VOCAB_SIZE, Architecture
from transformers import AutoConfig

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
_LINEAR, _FULL, _CONV = "linear_attention", "full_attention", "conv"
_LAST_FULL = {"layer_types": [_LINEAR, _LINEAR, _LINEAR, _FULL]}
_CONVS = {"layer_types": [_CONV, _CONV, _FULL, _CONV]}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "head_dim": 16,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "layer_types": [_LINEAR, _FULL, _LINEAR, _FULL],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**_DELTA, **_LAST_FULL},
    "qwen3_5_moe_text": {**_DELTA, **_EXPERTS, **_LAST_FULL},
    "qwen3_next": {**_DELTA, **_EXPERTS, **_LAST_FULL},
    "lfm2": {**_CONVS, "conv_L_cache": 3},
    "lfm2_moe": {**_CONVS, **_EXPERTS, "num_dense_layers": 1},
    "lfm3": _CONVS,
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention", "mamba", "mamba"]},
    "nemotron_h": {
        "hybrid_override_pattern": "M*M-",
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "head_dim": 16,
    },
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64, "mamba_d_head": 8},
    "olmo_hybrid": {},
    "kimi_linear": {**_LATENT, "linear_head_dim": 16, "linear_num_heads": 4},
    "bailing_hybrid": {**_LATENT, "n_group": 2, "topk_group": 1, "head_dim": 16},
    "minimax": {"num_local_experts": 2, "layer_types": [_LINEAR, _FULL, _LINEAR, _FULL]},
    "recurrent_gemma": {"attention_window_size": 16},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "num_experts": 2,
        "mamba_d_state": 8,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "mamba_d_state": 16,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "mamba_ngroups": 1,
        "num_mem_blocks": 1,
    },
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
    "falcon_mamba": {"state_size": 8},
}
"""Settings of the config of each model, by `model_type`."""
ARCHITECTURES = {
    name: Architecture(
        name,
        partial(AutoConfig.for_model, name, **{**_COMMON, **settings}),
        slow_states=name != "qwen3_5_text",  # whose runs are recorded, and which has full attention
        attn_implementation="eager" if "mamba" in name or name == "recurrent_gemma" else "sdpa",
    )
    for name, settings in SETTINGS.items()
}
"""`tiny.build` creates models from them."""
