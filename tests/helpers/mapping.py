"""Small configurations of every name in Transformers' mappings of causal language models and of models with images.

One recipe shrinks the default config of a class. `SETTINGS` has what it cannot know: sizes that depend on each other,
and features that defaults leave out. `IMAGE_SETTINGS` has the same for models with an image encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

NAMES: tuple[str, ...] = tuple(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
IMAGE_NAMES: tuple[str, ...] = tuple(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)

_LAYERS = 4
_SIZES = {
    1: "topk_group",
    2: """
        num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads linear_num_key_heads
        num_experts_per_tok num_experts_per_token moe_k moe_topk moe_top_k n_group num_expert_group index_topk_blocks
        num_codebooks n_layers_per_attn_res_block num_kv_shared_layers max_window_layers no_rope_layer_interval
        global_attn_every_n_layers hc_mult hc_count heads_per_ngram hidden_size_per_layer_input
    """,
    4: """
        num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads encoder_attention_heads
        num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads linear_num_value_heads
        linear_num_heads num_experts num_local_experts moe_num_experts n_routed_experts num_hidden_layers n_layer
        n_layers num_layers decoder_layers encoder_layers num_decoder_layers num_encoder_layers num_blocks depth
        index_block_size
    """,
    8: """
        qk_rope_head_dim index_topk rotary_dim mamba_n_heads n_mamba_heads mamba_num_heads floor_scale
        log_scaling_n_floor indexer_budget
    """,
    16: """
        head_dim swa_head_dim qk_nope_head_dim v_head_dim kv_lora_rank index_head_dim sliding_window
        sliding_window_size local_attention attention_chunk_size attention_window_size window_size linear_head_dim
        linear_key_head_dim linear_value_head_dim mamba_d_state mamba_d_head mamba_head_dim ssm_state_size state_size
        dim_head d_head kv_channels attention_head_size chunk_size mamba_chunk_size laurel_rank adapter_rank
        o_lora_rank hc_lowrank local_attention_window_len time_step_rank mamba_dt_rank keep_window_size
        global_head_dim rel_extent index_n_heads
    """,
    32: "q_lora_rank moe_intermediate_size router_hidden_size shared_expert_intermediate_size expert_ffn_hidden_size",
    64: """
        hidden_size d_model n_embd emb_dim embedding_dim embedding_size input_embedding_size output_embedding_size
        word_embed_proj_dim attention_hidden_size lru_width mamba_d_ssm out_hidden_size projector_input_dim
        projector_output_dim backbone_hidden_size embed_dim dense_intermediate_size hidden_size_global
    """,
    128: """
        vocab_size intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim dff dim_ff d_inner ffn_hidden_size
        intermediate_size_mlp shared_intermediate_size shared_experts_intermediate_size decoder_vocab_size
        vocab_size_per_layer_input unpadded_vocab_size feed_forward_size codebook_size audio_vocab_size mlp_dim
    """,
    512: """
        max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions
        max_source_positions
    """,
}
_SIZE_OF = {key: size for size, keys in _SIZES.items() for key in keys.split()}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGE, BEGIN, END = 119, 121, 122
"""Placeholder of image tokens, and tokens around an image."""
_IMAGE_ROLES = {
    IMAGE: "image_token",
    120: "video_token",
    BEGIN: "vision_start_token image_start_token boi_token image_bos_token",
    END: "vision_end_token image_end_token eoi_token",
    123: "audio_token",
}
IMAGE_TOKENS = _TOKENS | {
    f"{role}{suffix}": token
    for token, roles in _IMAGE_ROLES.items()
    for role in roles.split()
    for suffix in ("_id", "_index")
}
"""Ids of special tokens of models with images, by the names that configs have for them."""
_IMAGE_SIZE_OF = _SIZE_OF | {"image_size": 16, "patch_size": 4}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SOME_SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
_DOTS3 = {
    "head_dim": 24,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 32,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 24,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "blenderbot": {"encoder_layers": 4},
    "blt": {"encoder_hash_byte_group_vocab": 128},
    "cohere_compass_text": {
        **_SOME_SLIDING,
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}, "ffn_config": {"moe_top_k": 2}},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1},
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {"mlp_layer_types": ["dense"] * 4, "adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": _DOTS3,
    "gemma4_assistant": {
        "text_config": {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 4,
        }
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "hrm_text": {"num_hidden_layers": 1, "num_layers_per_stack": None},
    "hunyuan_v1_moe": {"head_dim": 16},
    "laguna": _SOME_SLIDING,
    "mellum": _SOME_SLIDING,
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "ministral": {"head_dim": 16},
    "phi4_multimodal": {"sliding_window": 16},
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 16},
    "qwen4_exp": {"text_config": _INDEXER},
    "reformer": {
        "axial_pos_embds_dim": [16, 48],
        "axial_pos_shape": [16, 32],
        "attn_layers": ["local", "lsh", "local", "lsh"],
    },
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding"] * 2, "sliding_window": 16},
}
"""Arguments beside the shrunk ones, by model type. Those in a dictionary are added to the ones of a sub-config."""
_THREE_AXES = {"text_config": {"rope_parameters": _ROPE | {"mrope_section": [4, 2, 2]}}}
_QWEN3_VISION = {"vision_config": {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}}
_OMNI = {
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
    "audio_config": {"output_dim": 64},
    **_THREE_AXES,
    **_QWEN3_VISION,
}
_GEMMA4_VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "pooling_kernel_size": 2,
}
_VOCABULARY = {"<image>": IMAGE, **{f"IMGIMG{letter}Z": 10 + number for number, letter in enumerate("ABCDEFGHI")}}
_VISUAL_TOKENS = {
    "<image>": IMAGE,
    "<|extra_200|>": 20,
    **{f"<|visual token {number:06}|>": 10 + number for number in range(9)},
}
IMAGE_SETTINGS: dict[str, dict[str, Any]] = {
    "apertus1p5": {
        "image_token_offset": 10,
        "audio_token_offset": 19,
        "audio_config": {"codebook_dim": 64, "codebook_size": 9},
        "vision_config": {
            "base_channels": 32,
            "codebook_size": 9,
            "embed_dim": 16,
            "latent_channels": 16,
            "resolution": 16,
        },
    },
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "chameleon": {
        "vocabulary_map": _VOCABULARY,
        "vq_config": {
            "base_channels": 32,
            "embed_dim": 16,
            "latent_channels": 16,
            "num_embeddings": 9,
            "resolution": 16,
        },
    },
    "cohere_compass": {"text_config": SETTINGS["cohere_compass_text"]},
    "cosmos3_edge": _THREE_AXES,
    "cosmos3_omni": _THREE_AXES | _QWEN3_VISION,
    "deepseek_ocr2": {
        "vision_config": {"sam_config": {"downsample_channels": [64, 64]}},
        "text_config": {
            "mlp_layer_types": ["dense", "sparse"] * 2,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
        },
    },
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}},
    "emu3": {
        "vocabulary_map": _VISUAL_TOKENS,
        "vq_config": {"base_channels": 32, "channel_multiplier": [1, 2, 4], "codebook_size": 9, "hidden_size": 128},
    },
    "ernie4_5_vl_moe": {
        "text_config": {"rope_parameters": _ROPE | {"mrope_section": [3, 3, 2]}, "moe_intermediate_size": [32, 16]}
    },
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma4": {"vision_config": _GEMMA4_VISION},
    "gemma4_unified": {
        "vision_config": {
            "model_type": "gemma4_unified_vision",
            "mm_embed_dim": 64,
            "mm_posemb_size": 64,
            "output_proj_dims": 64,
            "patch_size": 2,
            "pooling_kernel_size": 2,
        },
    },
    "glm46v": _THREE_AXES,
    "glm4v": _THREE_AXES,
    "glm4v_moe": {
        "text_config": {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}
    },
    "glm_ocr": _THREE_AXES,
    "glmga": _THREE_AXES,
    "glm5_next": {"text_config": {"index_topk": 8, "index_kpool": 4}},
    "granite4_vision": {
        "image_grid_pinpoints": [[16, 16]],
        "deepstack_layer_map": [[1, 0]],
        "spatial_target_layers": [1, 1, 2, 2],
        "downsample_rate": "1/2",
    },
    "granite_docling": {"vision_config": {"deepstack_visual_indexes": [0, 1, 2], "scale_factor": 2}},
    "hunyuan_vl": {"text_config": {"head_dim": 16, "rope_parameters": _ROPE | {"mrope_section": [2, 2, 2, 2]}}},
    "hy_v4_vl": {"text_config": {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}}},
    "inkling2": {"vision_config": {"text_hidden_size": 64, "posemb_grid_size": 4}},
    "inkling2_loop": {
        "text_config": {"loop_layer_index_start": 2, "loop_layer_index_end": 4, "loop_num_passes": 2},
        "vision_config": {"text_hidden_size": 64, "posemb_grid_size": 4},
    },
    "janus": {"vision_config": {"projection_dim": 64}},
    "kimi_k25": {"projection_hidden_size": 64, "text_config": {"head_dim": 8}},
    "llama4": {
        "vision_config": {
            "intermediate_size": 256,
            "vision_output_dim": 24,
            "projector_input_dim": 24,
            "projector_output_dim": 24,
        }
    },
    "llava_next": {"image_grid_pinpoints": [[16, 16]]},
    "llava_next_video": {"image_grid_pinpoints": [[16, 16]]},
    "llava_onevision": {"image_grid_pinpoints": [[16, 16]], "vision_feature_select_strategy": "full"},
    "minicpm_ocr": {"image_token_id": IMAGE, "video_token_id": 120},
    "minicpmv4_6": {"image_token_id": IMAGE, "video_token_id": 120, "insert_layer_id": 1},
    "minicpmv4_7": {"image_token_id": IMAGE, "video_token_id": 120, "insert_layer_id": 1},
    "mistral4": {"head_dim": 24},
    "molmo2": {
        "image_patch_id": IMAGE,
        "vision_config": {"num_position_embeddings": 16, "head_dim": 16},
        "adapter_config": {"vision_feature_layer": [3, 1], "text_hidden_size": 64},
    },
    "muse_glimmer": {"out_hidden_size": 256, "projector_hidden_size": 64},
    "muse_spark": {"out_hidden_size": 256, "projector_hidden_size": 64},
    "nemotron_h_omni": {
        "image_token_id": IMAGE,
        "video_token_id": 120,
        "vision_hidden_size": 64,
        "vision_config": {"video_temporal_patch_size": 2},
    },
    "paddleocr_vl": _THREE_AXES,
    "paligemma": {"projection_dim": 64, "vision_config": {"projection_dim": 64}},
    "qwen2_5_omni_thinker": {"vision_start_token_id": BEGIN, "vision_end_token_id": END, **_THREE_AXES},
    "qwen2_5_vl": _THREE_AXES,
    "qwen2_vl": _THREE_AXES,
    "qwen3_omni_moe_thinker": _OMNI,
    "qwen3_vl": _THREE_AXES | _QWEN3_VISION,
    "qwen3_vl_moe": _THREE_AXES | _QWEN3_VISION,
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "step3p7": {"text_config": {"sliding_window": 16}},
    "unlimited_ocr": {"vision_config": {"sam_config": {"downsample_channels": [64, 64]}}},
    "vipllava": {"vision_feature_layers": [-2, -3]},
}
"""The same, added to `SETTINGS` for models with images."""
_VALID = {
    "gemma4_assistant": {
        "text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    }
}
"""Arguments without which a class has no default config."""


def small_config(model_type: str) -> PreTrainedConfig:
    """Return a small config of a model type, in any way that its class or Transformers' own checks allow."""
    plain = CONFIG_MAPPING[model_type](**_VALID.get(model_type, {}))
    return type(plain)(**_merged(_shrunk(plain), SETTINGS.get(model_type, {})))


def small_image_config(model_type: str) -> PreTrainedConfig:
    """Return a small config of a model type with an image encoder, whose special tokens are those of `IMAGE_TOKENS`."""
    plain = CONFIG_MAPPING[model_type](**_VALID.get(model_type, {}))
    settings = _shrunk(plain, _IMAGE_SIZE_OF, IMAGE_TOKENS)
    for more in (SETTINGS, IMAGE_SETTINGS):
        settings = _merged(settings, more.get(model_type, {}))
    return type(plain)(**settings)


def _merged(settings: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return settings with others in their place; those in a dictionary are added to the ones of a sub-config."""
    merged = dict(settings)
    for key, value in more.items():
        inner = merged.get(key)
        merged[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def _shrunk(
    config: PreTrainedConfig, sizes: Mapping[str, int] = _SIZE_OF, tokens: Mapping[str, int] = _TOKENS
) -> dict[str, Any]:
    """Return arguments for the class of a config that make a small one."""
    small: dict[str, Any] = {}
    for key, value in config.to_dict().items():
        own = vars(config).get(key)
        if isinstance(own, PreTrainedConfig):
            small[key] = {**_shrunk(own, sizes, tokens), "model_type": own.model_type}
        elif key in tokens:
            small[key] = tokens[key]
        elif key.endswith(("_token_id", "_token_index")) and value is not None:
            small[key] = 3
        elif isinstance(value, int) and not isinstance(value, bool) and key in sizes:
            small[key] = min(value, sizes[key])
        elif isinstance(value, tuple | list) and value and key in ("image_size", "patch_size") and key in sizes:
            small[key] = type(value)([sizes[key]] * len(value))
        elif isinstance(value, float) and key.endswith(("dropout", "pdrop")):
            small[key] = 0.0
    if "kv_lora_rank" in small:
        small["num_key_value_heads"] = small["num_attention_heads"]
    if "is_decoder" in vars(config):
        small["is_decoder"] = True
    kinds = list(dict.fromkeys(vars(config).get("layer_types") or ()))
    if len(kinds) > 1:
        small["layer_types"] = (kinds[:_LAYERS] * _LAYERS)[:_LAYERS]
    return small
