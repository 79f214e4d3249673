"""What each package offers, exactly: a name is public by being there."""

import importlib
import types

import pytest

PUBLIC = {
    "cache": {"FreeList"},
    "pallas_kernels": set(),
    "pallas_kernels.attention": {
        "SPAN",
        "attention_probabilities",
        "masked_attention",
        "paged_attention",
    },
    "pallas_kernels.causal_conv": {"causal_conv", "conv_rows"},
    "pallas_kernels.dense": {"InputMajor", "dense", "linear"},
    "pallas_kernels.gated_delta_net": {
        "GdnLog",
        "LogInputs",
        "StateDtype",
        "gated_delta_rule",
        "log_step",
    },
    "pallas_kernels.moe": {"expert_mix", "route"},
    "pallas_kernels.ngram": {"check_bounds", "ngram_rows"},
    "pallas_kernels.norm": {"gated_rms_norm", "grouped_rms_norm", "inverse_length", "rms_norm"},
    "pallas_kernels.qsa": {"Selection", "pool_raw_keys", "select_tokens", "sparse_attention"},
    "pallas_kernels.rope": {"rope"},
    "pallas_kernels.sampling": {
        "ENDS_OUTPUT",
        "GENERATED",
        "IN_PROMPT",
        "Penalties",
        "Sampling",
        "SlotHistory",
        "choose",
        "count_tokens",
        "filtered_logits",
        "history_spec",
        "likeliest",
        "log_probabilities",
        "penalized",
        "top_tokens",
        "with_slot",
        "with_tokens",
    },
    "qwen_hybrid": {
        "COMPILER_OPTIONS",
        "Call",
        "Checkpoint",
        "CheckpointError",
        "Chosen",
        "Conversion",
        "DSparkConfig",
        "Format",
        "HybridConfig",
        "HybridModel",
        "MemoryItem",
        "MemoryReport",
        "ModelState",
        "Numerics",
        "Reads",
        "Sampling",
        "SequenceOutput",
        "Sequences",
        "SlotParameters",
        "StateConfig",
        "StateDtype",
        "Wanted",
        "commit",
        "convert_checkpoint",
        "dummy_params",
        "extend",
        "fixed_batch",
        "init_state",
        "inventory",
        "load_checkpoint",
        "load_params",
        "logits",
        "memory_report",
        "prepare",
        "save_hf",
        "start_state",
        "state_spec",
        "token_log_probabilities",
    },
    "serve": {"Engine", "EngineDeadError", "SamplingParams", "StepError"},
    "spec": {
        "AbstractDrafter",
        "Accepted",
        "GivenDrafts",
        "Layout",
        "MtpDrafter",
        "NO_DRAFTS",
        "Observed",
        "PromptLookup",
        "Proposal",
        "SpecCall",
        "SpecState",
        "StepOutput",
        "Target",
        "Verified",
        "accept",
        "committed",
        "observed",
        "parameters",
        "ready",
        "round_call",
        "start",
        "step",
        "verify",
        "with_drafts",
    },
}


@pytest.mark.parametrize("package", PUBLIC)
def test_exported_names(package):
    module = importlib.import_module(package)
    names = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert names == PUBLIC[package]
