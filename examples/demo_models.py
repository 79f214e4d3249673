"""Architectures of the two demo models, as the content of their config.json."""

from typing import Any

MAX_LENGTH = 32768
END_OF_TEXT_ID = 4086
THREE_TO_ONE = (["linear_attention"] * 3 + ["full_attention"]) * 2
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
COMMON: dict[str, Any] = {
    "vocab_size": 4096,
    "num_hidden_layers": 8,
    "layer_types": THREE_TO_ONE,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rope_parameters": ROPE,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": MAX_LENGTH,
    "bos_token_id": END_OF_TEXT_ID,
    "eos_token_id": END_OF_TEXT_ID,
    "pad_token_id": END_OF_TEXT_ID,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
}
# Every mechanism of the family at a width of 192: four streams, an n-gram table in one layer,
# sparse attention that drops groups beyond 64 tokens, eight experts. Three value heads read one
# key head, as in the large models.
DEMO: dict[str, Any] = COMMON | {
    "model_type": "qwen4_exp_text",
    "architectures": ["Qwen4ExpForCausalLM"],
    "hidden_size": 192,
    "tie_word_embeddings": False,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 32,
    "output_gate_type": "sigmoid",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "norm_topk_prob": True,
    "hc_count": 4,
    "hc_lowrank": 16,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [2],
    "ple_embed_dim": 192,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 4,
    "ngram_vocab_size_base": 1021,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 4,
    "seed": 1234,
}
# The dense family, as many value heads as key heads.
DEMO_DENSE: dict[str, Any] = COMMON | {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 224,
    "intermediate_size": 320,
    "tie_word_embeddings": True,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
}
# The architectures at toy sizes, for checks of the training code itself.
TINY: dict[str, Any] = DEMO | {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "layer_types": THREE_TO_ONE[:4],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "hc_lowrank": 4,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "ple_embed_dim": 32,
    "ngram_vocab_size_base": 53,
}
MODELS: dict[str, dict[str, Any]] = {"demo": DEMO, "demo-dense": DEMO_DENSE, "tiny": TINY}
