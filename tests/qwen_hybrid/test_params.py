"""Declarations: names and shapes as transformers builds them, sizes as published."""

import math
from typing import Any

import jax
import pytest
import torch
import transformers

from qwen_hybrid.config import HybridConfig
from qwen_hybrid.params import (
    FLOAT32,
    ParamSpec,
    ParamTree,
    abstract_params,
    leaves,
    model_specs,
    mtp_specs,
    num_bytes,
    num_params,
)
from tests.vector_configs import TINY, hf_config

# Published with the checkpoints: parameters of the text model, tensors of the text model,
# tensors of the whole checkpoint (text, MTP head, vision), bytes of all of them.
PUBLISHED = {
    "Qwen3.5-0.8B": (752_393_024, 320, 488, 1_746_882_752),
    "Qwen3.5-2B": (1_881_825_088, 320, 632, 4_548_144_832),
    "Qwen3.5-4B": (4_205_751_296, 426, 738, 9_319_737_856),
    "Qwen3.5-9B": (8_953_803_264, 427, 775, 19_306_216_416),
    "Qwen3.5-27B": (26_895_998_464, 851, 1199, 55_562_872_800),
    "Qwen3.8-27B": (26_895_998_464, 851, 1199, 55_562_855_904),
    "Qwen3.6-35B-A3B": (34_660_610_688, 693, 1045, 71_903_645_408),
    "Qwen3.8-Flash-Next": (176_943_899_520, 1294, 1658, 359_999_963_128),
}
# Tensors of the MTP head, by family.
MTP_TENSORS = {"qwen3_5": 15, "qwen3_5_moe": 19, "qwen4_exp": 31}
FLASH_NEXT_MTP_PARAMS = 90_568_448 + 2_516_582_400
FLASH_NEXT_TABLE_PARAMS = 51_200_245_760
# The integer buffers of an n-gram table: multipliers, moduli, offsets.
TABLE_BUFFERS = (3, 16, 16)


def specs_of(name: str) -> tuple[HybridConfig, ParamTree]:
    config = HybridConfig.from_hf(hf_config(name))
    return config, model_specs(config)


def vision_tensors(name: str) -> list[int]:
    """Return the sizes of the vision tensors that a real checkpoint also holds."""
    vision = hf_config(name)["vision_config"]
    width, inner, out = (
        vision["hidden_size"],
        vision["intermediate_size"],
        vision["out_hidden_size"],
    )
    block = [width, width, width, width, 3 * width * width, 3 * width, width * width, width]
    block += [inner * width, inner, width * inner, width]
    merged = 4 * width
    rest = [width * 3 * 2 * 16 * 16, width, 2304 * width, width, width]
    rest += [merged * merged, merged, out * merged, out]
    return block * vision["depth"] + rest


def is_float32_on_disk(name: str, path: tuple[str, ...]) -> bool:
    """Qwen3.5 stores two of a GDN layer's parameters in float32; later checkpoints none."""
    return name.startswith("Qwen3.5") and path[-2:] in (
        ("linear_attn", "A_log"),
        ("linear_attn", "norm"),
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name: str):
    config, specs = specs_of(name)
    params, text_tensors, all_tensors, total_bytes = PUBLISHED[name]
    mtp = specs.pop("mtp")
    abstract = jax.eval_shape(lambda tree: tree, abstract_params(specs, "bfloat16"))
    assert sum(leaf.size for leaf in jax.tree.leaves(abstract)) == num_params(specs) == params
    assert len(list(leaves(mtp))) == MTP_TENSORS[config.family]
    tensors = len(list(leaves(specs)))
    buffers = []
    if config.ple is not None:
        buffers = list(TABLE_BUFFERS)
        tensors += config.ple.num_shards - 1 + len(buffers)
    vision = vision_tensors(name)
    assert tensors == text_tensors
    assert tensors + len(list(leaves(mtp))) + len(vision) == all_tensors
    float32 = sum(spec.size for path, spec in leaves(specs) if is_float32_on_disk(name, path))
    halves = params + num_params(mtp) + sum(vision)
    assert 2 * halves + 2 * float32 + 8 * sum(buffers) == total_bytes


def test_parts_of_flash_next():
    config, specs = specs_of("Qwen3.8-Flash-Next")
    assert num_params(mtp_specs(config)) == FLASH_NEXT_MTP_PARAMS
    assert specs["layers_1"]["ple"]["ngram_embedding"].size == FLASH_NEXT_TABLE_PARAMS
    assert [i for i in range(config.num_layers) if "ple" in specs[f"layers_{i}"]] == [1]


def expected_shapes(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the parameters that transformers makes of a text config, without memory for them."""
    keys = {k: v for k, v in hf.items() if k not in ("model_type", "architectures")}
    reference = transformers.AutoConfig.for_model(hf["model_type"], **keys)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(reference)
    return {name: tuple(value.shape) for name, value in model.named_parameters()}


def declared_shapes(specs: ParamTree) -> dict[str, tuple[int, ...]]:
    def on_disk(spec: ParamSpec) -> tuple[int, ...]:
        is_conv = spec.name.endswith("conv1d.weight")
        return (spec.shape[0], 1, spec.shape[1]) if is_conv else spec.shape

    return {
        spec.name if path[0] == "lm_head" else f"model.{spec.name}": on_disk(spec)
        for path, spec in leaves(specs)
        if path[0] != "mtp"
    }


@pytest.mark.parametrize(
    "name", [*TINY, "Qwen3.5-0.8B", "Qwen3.8-27B", "Qwen3.6-35B-A3B", "Qwen3.8-Flash-Next"]
)
def test_names_and_shapes_match_transformers(name: str):
    hf = hf_config(name)
    _, specs = specs_of(name)
    assert declared_shapes(specs) == expected_shapes(hf.get("text_config", hf))


@pytest.mark.parametrize("name", [*TINY, "Qwen3.5-0.8B", "Qwen3.8-Flash-Next"])
def test_paths_follow_names(name: str):
    """A path is its name's modules, with the table's wrapper and the weight suffix dropped."""
    for path, spec in leaves(specs_of(name)[1]):
        modules = spec.name.removesuffix(".weight").replace("ple_embedding.", "")
        assert ".".join(path).replace("layers_", "layers.") == modules


def test_bytes_count_float32_parameters_as_such():
    config, specs = specs_of("Qwen3.8-27B")
    float32 = sum(spec.size for _, spec in leaves(specs) if spec.dtype == FLOAT32)
    # A_log, dt_bias and the output norm of 48 layers.
    assert float32 == 48 * (48 + 48 + 128)
    assert num_bytes(specs, "bfloat16") == 2 * num_params(specs) + 2 * float32
    assert num_bytes(specs, "float32") == 4 * num_params(specs)
    assert config.num_mtp_layers == 1
    assert all(math.prod(spec.shape) == spec.size for _, spec in leaves(specs))


def test_a_declaration_is_checked():
    with pytest.raises(ValueError, match="one axis name per dimension"):
        ParamSpec((2, 3), "activation", ("embed",), "x.weight", "normal")
    with pytest.raises(ValueError, match="init"):
        ParamSpec((2,), "activation", ("embed",), "x.weight", "uniform")
