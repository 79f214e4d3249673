"""A public report's experiment by its own numbers: every draft rejected, and no divergence.

Issue 35150 of sgl-project/sglang: 24 prompt ids, greedy, 96 tokens past the end of the text, one
draft a round, each rejected. There, verify drifted from plain decoding: the first token differed at
output index 13, with beta rounded alike at 23, with a float32 state at 38.
"""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from serve import Engine
from tests import tiny_models
from tests.vector_configs import hf_config

# The request of the report, and the digest of the ids that it gives.
INPUT_IDS = [
    *(248045, 846, 198, 623, 799, 61446, 13901, 11, 10033, 3069, 10583, 5802),
    *(4833, 5983, 13, 248046, 198, 248045, 74455, 198, 248068, 271, 248069, 271),
]
SHA256 = "f3d5baaf2ddb361d0d9fbff4add8071e24718908f76ae350ced01927dd87fcd0"
NUM_TOKENS = 96
GREEDY = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
REJECT = {"speculative_debug": "reject", "speculative_num_draft_tokens": 2}


def directory(folder: Path) -> Path:
    """The 27B's recurrent, attention and vocabulary shapes in four narrow layers."""
    text = hf_config("Qwen3.8-27B")["text_config"] | {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "mtp_num_hidden_layers": 0,
    }
    shapes = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim")
    assert [text[name] for name in shapes] == [16, 48, 128]
    heads = ("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    assert [text[name] for name in heads] == [24, 4, 256, 248320]
    return tiny_models.write(folder, {"model_type": "qwen3_5", "text_config": text})


def generate(model: Path, state_dtype: str, **speculation: Any) -> dict[str, Any]:
    """What an engine gives for the request of the report."""
    with Engine(
        model,
        load_format="dummy",
        skip_tokenizer_init=True,
        compilation_cache_dir=None,
        dtype="bfloat16",
        state_dtype=state_dtype,
        max_running_requests=1,
        # With the rows of a window, one program of 16 rows.
        chunked_prefill_size=14,
        context_length=128,
        **speculation,
    ) as engine:
        result = engine.generate(
            input_ids=INPUT_IDS,
            sampling_params=GREEDY,
            return_logprob=True,
            top_logprobs_num=2,
            return_state_digest=True,
        )
    assert isinstance(result, dict)
    return result


@pytest.mark.parametrize(
    "state_dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)]
)
def test_forced_rejection_gives_the_bits_of_plain_decoding(tmp_path, state_dtype):
    assert hashlib.sha256(",".join(map(str, INPUT_IDS)).encode()).hexdigest() == SHA256
    model = directory(tmp_path)
    plain = generate(model, state_dtype)
    rejected = generate(model, state_dtype, **REJECT)
    assert len(plain["output_ids"]) == NUM_TOKENS
    assert rejected["output_ids"] == plain["output_ids"]
    # A random model may repeat itself; a text that is one token over and over would show little.
    assert len(set(plain["output_ids"])) > NUM_TOKENS // 2
    before, after = plain["meta_info"], rejected["meta_info"]
    for name in ("output_token_logprobs", "output_top_logprobs", "state_digests"):
        assert after[name] == before[name], name
    # Source: the report's own counters.
    assert after["spec_verify_ct"] == after["spec_num_proposed_drafts"] == 95
    assert after["spec_num_correct_drafts"] == after["spec_accept_rate"] == 0
    assert after["spec_accept_histogram"] == after["spec_correct_drafts_histogram"] == [95]
