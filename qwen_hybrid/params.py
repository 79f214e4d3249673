"""Parameters of a hybrid model, each declared once.

The tree is a nested dict that follows the checkpoint's own submodule names with ``.weight``
dropped. Matrices keep the layout on disk, ``[out, in]``. From these declarations derive the
loader's expectations, random initialisation, memory budgets and shardings.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from qwen_hybrid.config import HybridConfig, LayerKind
from qwen_hybrid.layer_config import check

ACTIVATION = "activation"
FLOAT32 = "float32"
INITS = ("normal", "embedding", "zeros", "ones", "conv", "a_log", "dt_bias")
ITEM_SIZES = {"float32": 4, "bfloat16": 2}

# A nested dict whose leaves are ParamSpec, or arrays in the tree that is made from it.
ParamTree = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """Declaration of one parameter.

    Attributes:
        shape: shape in memory. On disk ``conv1d`` has a middle axis of one more.
        dtype: ACTIVATION (the model's dtype) or FLOAT32 (always).
        axes: meaning of each axis, for shardings.
        name: checkpoint name below the module that the builder describes.
        init: distribution of random weights, one of INITS.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]
    name: str
    init: str

    def __post_init__(self) -> None:
        check(
            len(self.shape) == len(self.axes),
            "a parameter needs one axis name per dimension",
            name=self.name,
            shape=self.shape,
            axes=self.axes,
        )
        check(self.dtype in (ACTIVATION, FLOAT32), "unknown parameter dtype", dtype=self.dtype)
        check(self.init in INITS, f"init must be one of {', '.join(INITS)}", init=self.init)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def resolved_dtype(self, dtype: str) -> str:
        """Return the parameter's dtype in a model of this activation dtype."""
        return dtype if self.dtype == ACTIVATION else self.dtype

    def num_bytes(self, dtype: str) -> int:
        """Return the parameter's bytes in a model of this activation dtype."""
        return self.size * ITEM_SIZES[self.resolved_dtype(dtype)]


def _matrix(name: str, out: tuple[int, str], inner: tuple[int, str]) -> ParamSpec:
    return ParamSpec((out[0], inner[0]), ACTIVATION, (out[1], inner[1]), f"{name}.weight", "normal")


def _norm(name: str, size: int, axis: str = "embed") -> ParamSpec:
    """Declare a zero-centred norm weight."""
    return ParamSpec((size,), ACTIVATION, (axis,), f"{name}.weight", "zeros")


def linear_attn_specs(config: HybridConfig) -> ParamTree:
    """Declare the Gated DeltaNet mixer."""
    gdn = config.gdn
    embed = (config.hidden_size, "embed")
    heads = (gdn.num_value_heads, "value_heads")
    values = (gdn.value_width, "gdn_values")
    channels = gdn.conv_channels
    return {
        "in_proj_qkv": _matrix("in_proj_qkv", (channels, "gdn_channels"), embed),
        "in_proj_z": _matrix("in_proj_z", values, embed),
        "in_proj_b": _matrix("in_proj_b", heads, embed),
        "in_proj_a": _matrix("in_proj_a", heads, embed),
        "conv1d": ParamSpec(
            (channels, gdn.conv_width),
            ACTIVATION,
            ("gdn_channels", "taps"),
            "conv1d.weight",
            "conv",
        ),
        "A_log": ParamSpec((heads[0],), FLOAT32, (heads[1],), "A_log", "a_log"),
        "dt_bias": ParamSpec((heads[0],), FLOAT32, (heads[1],), "dt_bias", "dt_bias"),
        # The only norm that is not zero-centred.
        "norm": ParamSpec((gdn.value_dim,), FLOAT32, ("value_dim",), "norm.weight", "ones"),
        "out_proj": _matrix("out_proj", embed, values),
    }


def self_attn_specs(config: HybridConfig, kind: LayerKind) -> ParamTree:
    """Declare gated attention, with its indexer if the layer is sparse."""
    attention = config.attention
    embed = (config.hidden_size, "embed")
    width = attention.num_heads * attention.head_dim
    keys = (attention.num_kv_heads * attention.head_dim, "kv_heads")
    specs: ParamTree = {
        # Per head the query rows, then the rows of the output gate.
        "q_proj": _matrix("q_proj", (2 * width, "heads"), embed),
        "k_proj": _matrix("k_proj", keys, embed),
        "v_proj": _matrix("v_proj", keys, embed),
        "o_proj": _matrix("o_proj", embed, (width, "heads")),
        "q_norm": _norm("q_norm", attention.head_dim, "head_dim"),
        "k_norm": _norm("k_norm", attention.head_dim, "head_dim"),
    }
    if kind is LayerKind.QSA:
        specs["indexer"] = _indexer_specs(config)
    return specs


def _indexer_specs(config: HybridConfig) -> ParamTree:
    assert config.qsa is not None
    dim = config.qsa.head_dim
    rows = (config.qsa.num_heads + 1) * dim
    return {
        # Rows of the query heads, then those of the one key head.
        "index_qk_proj": _matrix(
            "indexer.index_qk_proj", (rows, "index_heads"), (config.hidden_size, "embed")
        ),
        "q_layernorm": _norm("indexer.q_layernorm", dim, "index_dim"),
        "k_layernorm": _norm("indexer.k_layernorm", dim, "index_dim"),
    }


def mlp_specs(config: HybridConfig) -> ParamTree:
    """Declare the gated MLP, or the experts that replace it."""
    if config.moe is None:
        return _gated_mlp_specs("", config.hidden_size, config.intermediate_size)
    moe = config.moe
    hidden = config.hidden_size
    experts = (moe.num_experts, moe.intermediate_size)
    return {
        "gate": _matrix("gate", (moe.num_experts, "experts"), (hidden, "embed")),
        "experts": {
            # Per expert the gate rows, then the up rows. These two have no ".weight" on disk.
            "gate_up_proj": ParamSpec(
                (experts[0], 2 * experts[1], hidden),
                ACTIVATION,
                ("experts", "expert_mlp", "embed"),
                "experts.gate_up_proj",
                "normal",
            ),
            "down_proj": ParamSpec(
                (experts[0], hidden, experts[1]),
                ACTIVATION,
                ("experts", "embed", "expert_mlp"),
                "experts.down_proj",
                "normal",
            ),
        },
        "shared_expert": _gated_mlp_specs("shared_expert.", hidden, moe.shared_intermediate_size),
        "shared_expert_gate": _matrix("shared_expert_gate", (1, "one"), (hidden, "embed")),
    }


def _gated_mlp_specs(prefix: str, hidden_size: int, intermediate_size: int) -> ParamTree:
    embed, mlp = (hidden_size, "embed"), (intermediate_size, "mlp")
    return {
        "gate_proj": _matrix(f"{prefix}gate_proj", mlp, embed),
        "up_proj": _matrix(f"{prefix}up_proj", mlp, embed),
        "down_proj": _matrix(f"{prefix}down_proj", embed, mlp),
    }


def hyper_connection_specs(config: HybridConfig, *, inject: bool) -> ParamTree:
    """Declare a hyper-connection.

    Args:
        config: a config with hyper-connections.
        inject: whether it writes back to the streams; the output mixer only reads.
    """
    assert config.hyper_connection is not None
    count, rank = config.hyper_connection.count, config.hyper_connection.lowrank
    streams = (count * config.hidden_size, "streams")
    specs: ParamTree = {
        "hc_norm": _norm("hc_norm", *streams),
        "input_mix_weight_down": _matrix("input_mix_weight_down", (rank, "rank"), streams),
        "input_mix_weight_up": _matrix("input_mix_weight_up", streams, (rank, "rank")),
    }
    if inject:
        specs["block_inject_weight"] = _matrix("block_inject_weight", (count, "stream"), streams)
    return specs


def ple_specs(config: HybridConfig, rank: int) -> ParamTree:
    """Declare the n-gram embedding of the PLE layer with this rank among the PLE layers.

    On disk the table is ``ple_embedding.ngram_embedding.shard_*.weight``, beside integer
    buffers that follow from the config.
    """
    assert config.ple is not None and config.hyper_connection is not None
    ple = config.ple
    embed = (ple.embed_dim, "ple_embed")
    streams = (config.hyper_connection.count * config.hidden_size, "streams")
    table = ple.table(rank, config.vocab_size)
    return {
        "key_proj": _matrix("key_proj", streams, embed),
        "value_proj": _matrix("value_proj", (config.hidden_size, "embed"), embed),
        "norm_key": _norm("norm_key", *streams),
        "norm_query": _norm("norm_query", *streams),
        "norm_conv": _norm("norm_conv", *streams),
        "conv1d": ParamSpec(
            (streams[0], ple.conv_width), ACTIVATION, (streams[1], "taps"), "conv1d.weight", "conv"
        ),
        "ngram_embedding": ParamSpec(
            (table.num_rows, ple.row_width),
            ACTIVATION,
            ("ngram_rows", "ngram_width"),
            "ple_embedding.ngram_embedding.weight",
            "embedding",
        ),
    }


def layer_specs(config: HybridConfig, layer_index: int) -> ParamTree:
    """Declare one decoder layer."""
    specs = _block_specs(config, config.layer_kinds[layer_index])
    if config.ple is not None and layer_index in config.ple.layers:
        rank = config.ple.layers.index(layer_index)
        specs["ple"] = _under("ple.", ple_specs(config, rank))
    return specs


def _block_specs(config: HybridConfig, kind: LayerKind) -> ParamTree:
    """Declare a token mixer and an MLP with the norms around them."""
    specs: ParamTree = {}
    if config.hyper_connection is None:
        for name in ("input_layernorm", "post_attention_layernorm"):
            specs[name] = _norm(name, config.hidden_size)
    else:
        for name in ("attn_hyper_connection", "mlp_hyper_connection"):
            specs[name] = _under(f"{name}.", hyper_connection_specs(config, inject=True))
    if kind is LayerKind.GDN:
        specs["linear_attn"] = _under("linear_attn.", linear_attn_specs(config))
    else:
        specs["self_attn"] = _under("self_attn.", self_attn_specs(config, kind))
    specs["mlp"] = _under("mlp.", mlp_specs(config))
    return specs


def _mixer_or_norm(config: HybridConfig) -> ParamTree:
    """Declare what stands between the last layer and the head."""
    if config.hyper_connection is None:
        return {"norm": _norm("norm", config.hidden_size)}
    mixer = hyper_connection_specs(config, inject=False)
    return {"hyper_connection_mixer": _under("hyper_connection_mixer.", mixer)}


def mtp_specs(config: HybridConfig) -> ParamTree:
    """Declare the MTP head: the projections of its two inputs, one attention layer, its norm."""
    hidden = config.hidden_size
    embed = (hidden, "embed")
    specs: ParamTree = {"pre_fc_norm_embedding": _norm("pre_fc_norm_embedding", hidden)}
    if config.hyper_connection is None:
        kind = LayerKind.ATTENTION
        specs["pre_fc_norm_hidden"] = _norm("pre_fc_norm_hidden", hidden)
        # Columns of the embedding, then those of the target's hidden row.
        specs["fc"] = _matrix("fc", embed, (2 * hidden, "embed_pair"))
    else:
        kind = LayerKind.QSA
        streams = config.hyper_connection.count * hidden
        specs["pre_fc_norm_hidden"] = _norm("pre_fc_norm_hidden", streams, "streams")
        specs["fc_embedding"] = _matrix("fc_embedding", embed, embed)
        specs["fc_hidden"] = _matrix("fc_hidden", embed, embed)
    specs["layers_0"] = _under("layers.0.", _block_specs(config, kind))
    return specs | _mixer_or_norm(config)


def model_specs(config: HybridConfig) -> ParamTree:
    """Declare a whole model, with its MTP head if the config has one.

    Names are relative to the text model, except those of ``lm_head`` and ``mtp``, which
    checkpoints keep outside it.
    """
    vocab = (config.vocab_size, "vocab")
    embedding = _matrix("embed_tokens", vocab, (config.hidden_size, "embed"))
    specs: ParamTree = {"embed_tokens": dataclasses.replace(embedding, init="embedding")}
    if not config.tie_word_embeddings:
        specs["lm_head"] = _matrix("lm_head", vocab, (config.hidden_size, "embed"))
    for index in range(config.num_layers):
        specs[f"layers_{index}"] = _under(f"layers.{index}.", layer_specs(config, index))
    specs |= _mixer_or_norm(config)
    if config.num_mtp_layers:
        specs["mtp"] = _under("mtp.", mtp_specs(config))
    return specs


def _under(prefix: str, specs: ParamTree) -> ParamTree:
    """Return the declarations with their checkpoint names moved below a module."""
    return {
        key: dataclasses.replace(spec, name=prefix + spec.name)
        if isinstance(spec, ParamSpec)
        else _under(prefix, spec)
        for key, spec in specs.items()
    }


def leaves(tree: ParamTree, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path, leaf) of every leaf of a parameter tree, in the tree's order."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def abstract_params(specs: ParamTree, dtype: str) -> ParamTree:
    """Return the tree of shapes and dtypes that declarations have in a model of this dtype."""
    tree: ParamTree = {}
    for path, spec in leaves(specs):
        resolved = jnp.dtype(spec.resolved_dtype(dtype))
        set_leaf(tree, path, jax.ShapeDtypeStruct(spec.shape, resolved))
    return tree


def num_params(specs: ParamTree) -> int:
    """Return the number of elements that a tree of declarations holds."""
    return sum(spec.size for _, spec in leaves(specs))


def num_bytes(specs: ParamTree, dtype: str) -> int:
    """Return the bytes of a tree of declarations in a model of this activation dtype."""
    return sum(spec.num_bytes(dtype) for _, spec in leaves(specs))


def set_leaf(tree: ParamTree, path: tuple[str, ...], value: Any) -> None:
    """Put a leaf into a tree under construction, making the dicts on the way."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
