"""Record of a checkpoint's quantisation config; loading quantised weights is not supported yet."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from qwen_hybrid.layer_config import check

METHODS = ("modelopt", "modelopt_fp4", "modelopt_mixed", "fp8", "compressed-tensors")
ALGORITHMS = (
    "NVFP4",
    "W4A16_NVFP4",
    "NVFP4_AWQ",
    "FP8",
    "FP8_BLOCK_SCALES",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "MIXED_PRECISION",
)
# Two spellings of one algorithm.
ALGORITHM_ALIASES = {"FP8_PB_WO": "FP8_BLOCK_SCALES"}
# Module lists under the names that the various writers use; all mean "left unquantised".
IGNORE_KEYS = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizationRecord:
    """What ``quantization_config`` says. Tensors on disk decide; this is a cross-check.

    Attributes:
        method: ``quant_method``, one of METHODS.
        algorithm: one of ALGORITHMS, or the ``format`` of compressed-tensors.
        group_size: inputs that share one scale, 0 if not stated.
        weight_block_size: rows and columns that share one scale, () if not stated.
        ignore: module names or globs that stay unquantised.
        modules_to_convert: modules quantised beyond the usual ones (embedding tables).
        quantized_layers: (module name, algorithm) of a mixed checkpoint.
        kv_cache_algorithm: algorithm the key/value cache was calibrated for, or None.
    """

    method: str
    algorithm: str
    group_size: int = 0
    weight_block_size: tuple[int, ...] = ()
    ignore: tuple[str, ...] = ()
    modules_to_convert: tuple[str, ...] = ()
    quantized_layers: tuple[tuple[str, str], ...] = ()
    kv_cache_algorithm: str | None = None

    def __post_init__(self) -> None:
        check_method(self.method)
        if self.method != "compressed-tensors":
            check_algorithm(self.algorithm)
        for _, algorithm in self.quantized_layers:
            check_algorithm(algorithm)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "QuantizationRecord":
        """Return the record of a ``quantization_config`` mapping.

        Raises:
            ValueError: unknown method or algorithm, or a missing key; the message names it.
        """
        check("quant_method" in config, "quantization_config needs quant_method", keys=[*config])
        check_method(str(config["quant_method"]))
        blocks = tuple(config.get("weight_block_size") or ())
        return cls(
            method=str(config["quant_method"]),
            algorithm=_algorithm(config, has_blocks=len(blocks) > 0),
            group_size=_group_size(config),
            weight_block_size=blocks,
            ignore=tuple(name for key in IGNORE_KEYS for name in _names(config.get(key))),
            modules_to_convert=_names(config.get("modules_to_convert")),
            quantized_layers=tuple(
                (name, _canonical(layer.get("quant_algo")))
                for name, layer in (config.get("quantized_layers") or {}).items()
            ),
            kv_cache_algorithm=_kv_cache_algorithm(config),
        )


def check_method(method: str) -> None:
    """Raise a ValueError unless the method is known."""
    check(
        method in METHODS,
        f"quantization_config.quant_method must be one of {', '.join(METHODS)}",
        quant_method=method,
    )


def check_algorithm(algorithm: str) -> None:
    """Raise a ValueError unless the algorithm is known."""
    check(
        algorithm in ALGORITHMS,
        f"quantization_config.quant_algo must be one of {', '.join(ALGORITHMS)}",
        quant_algo=algorithm,
    )


def _canonical(algorithm: Any) -> str:
    return ALGORITHM_ALIASES.get(str(algorithm), str(algorithm))


def _algorithm(config: Mapping[str, Any], *, has_blocks: bool) -> str:
    """Return the algorithm; block and per-tensor FP8 checkpoints do not spell theirs."""
    if config["quant_method"] == "fp8":
        return "FP8_BLOCK_SCALES" if has_blocks else "FP8"
    if config["quant_method"] == "compressed-tensors":
        check("format" in config, "quantization_config needs format", keys=[*config])
        return str(config["format"])
    check("quant_algo" in config, "quantization_config needs quant_algo", keys=[*config])
    return _canonical(config["quant_algo"])


def _group_size(config: Mapping[str, Any]) -> int:
    groups = (config.get("config_groups") or {}).values()
    sizes = [group.get("weights", {}).get("group_size") or 0 for group in groups]
    return config.get("group_size") or next((size for size in sizes if size), 0)


def _names(value: Any) -> tuple[str, ...]:
    """Return a list of names; a lone string counts as a list of one."""
    return (value,) if isinstance(value, str) else tuple(value or ())


def _kv_cache_algorithm(config: Mapping[str, Any]) -> str | None:
    scheme = config.get("kv_cache_scheme")
    if scheme:
        is_fp8 = scheme.get("num_bits") == 8 and scheme.get("type") == "float"
        check(is_fp8, "kv_cache_scheme must be 8-bit float", kv_cache_scheme=scheme)
        return "FP8"
    return config.get("kv_cache_quant_algo")
