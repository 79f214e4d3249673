"""`info`: a model, what it takes in memory, what its bits belong to; no weights are read."""

import argparse
import collections
import dataclasses
import json
import math
from typing import Any

from qwen_hybrid import HybridConfig, StateConfig
from qwen_hybrid.memory import KINDS, MemoryReport, memory_report
from qwen_hybrid.numerics import numerics
from qwen_hybrid.params import leaves, model_specs
from qwen_hybrid.progress import readable_bytes
from serve.cli.command import Command
from serve.cli.errors import EXIT_OK
from serve.cli.flags import ENGINE_GROUPS, Flag, engine_arguments, engine_config
from serve.engine_config import longest_text, size_pools
from serve.model_path import resolve_model_path

INFO_FLAGS = (Flag(name="json", read=bool, default=False, help="print one JSON object"),)


def run(args: argparse.Namespace) -> int:
    """Print what the directory's `config.json` and the flags come to."""
    engine = engine_config(engine_arguments(args))
    directory = resolve_model_path(args.model_path)
    config = HybridConfig.from_directory(directory)
    dtype = config.dtype if engine.dtype == "auto" else engine.dtype
    state_config, _ = size_pools(engine, config, dtype)
    found = {
        "model_path": str(directory),
        "model": _model(config),
        "num_parameters": _num_parameters(config, is_mtp=False),
        "num_mtp_parameters": _num_parameters(config, is_mtp=True),
        "dtype": dtype,
        "max_running_requests": engine.max_running_requests,
        "context_length": longest_text(engine, config),
        "memory": _memory(memory_report(config, state_config), state_config),
        "numerics": dataclasses.asdict(numerics(state_config)),
    }
    print(json.dumps(found, indent=2) if args.json else "\n".join(_lines(found)))
    return EXIT_OK


def _model(config: HybridConfig) -> dict[str, Any]:
    """Return the architecture, without what the model has none of."""
    kinds = collections.Counter(kind.value for kind in config.layer_kinds)
    model = {
        "family": config.family,
        "num_layers": config.num_layers,
        "layers": dict(kinds),
        "num_mtp_layers": config.num_mtp_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size or None,
        "num_experts": config.moe.num_experts if config.moe else None,
        "num_experts_per_token": config.moe.top_k if config.moe else None,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
    }
    return {name: value for name, value in model.items() if value is not None}


def _num_parameters(config: HybridConfig, *, is_mtp: bool) -> int:
    """Count the parameters of the MTP head, or all others."""
    parts = leaves(model_specs(config))
    return sum(math.prod(spec.shape) for path, spec in parts if (path[0] == "mtp") == is_mtp)


def _memory(report: MemoryReport, state_config: StateConfig) -> dict[str, Any]:
    """Return the memory report as plain data."""
    return {
        "weight_bytes": report.weight_bytes,
        "state_bytes": report.num_state_bytes,
        "block_size": state_config.block_size,
        "num_blocks": state_config.num_blocks,
        "num_state_slots": state_config.num_state_slots,
        "num_spare_state_slots": report.num_spare_slots,
        "conv_window_bytes": report.conv_window_bytes,
        "ple_window_bytes": report.ple_window_bytes,
        "state": [
            dataclasses.asdict(item) | {"unit_bytes": item.unit_bytes} for item in report.items
        ],
    }


def _lines(found: dict[str, Any]) -> list[str]:
    """Return the same for a reader."""
    model, memory = found["model"], found["memory"]
    layers = ", ".join(f"{count} {kind}" for kind, count in model["layers"].items())
    sizes = [f"{name} {value}" for name, value in model.items() if name not in ("family", "layers")]
    weights = ", ".join(f"{name} {readable_bytes(n)}" for name, n in memory["weight_bytes"].items())
    total = readable_bytes(sum(memory["weight_bytes"].values()))
    blocks = f"{memory['num_blocks']} blocks of {memory['block_size']} tokens"
    return [
        f"model       {found['model_path']}: {model['family']}, {found['dtype']}",
        f"layers      {layers}",
        f"sizes       {', '.join(sizes)}",
        f"parameters  {found['num_parameters']:,} and {found['num_mtp_parameters']:,} of MTP",
        f"weights     {total} ({weights})",
        f"state       {readable_bytes(memory['state_bytes'])} for "
        f"{found['max_running_requests']} sequences of up to {found['context_length']} tokens, "
        f"{blocks}, {memory['num_state_slots']} state slots",
        "",
        f"{'kind of state':<36}{'bytes':>16}{'bytes each':>16}  of",
        *(_item_line(item) for item in memory["state"]),
        "",
        f"windows     {memory['conv_window_bytes']:,} bytes a sequence of the convolution rings, "
        f"{memory['ple_window_bytes']:,} of the n-gram embedding's",
        "numerics    " + json.dumps(found["numerics"], sort_keys=True),
    ]


def _item_line(item: dict[str, Any]) -> str:
    """Return one row of the table."""
    each = f"{item['unit_bytes']:,.2f}".removesuffix(".00")
    count = f"{item['count']:,} {item['unit']}{'s' if item['count'] != 1 else ''}"
    return f"{KINDS[item['kind']]:<36}{item['num_bytes']:>16,}{each:>16}  {count}"


COMMAND = Command(
    name="info",
    help="what a model is, what it takes in memory, what its bits belong to",
    groups={"output": INFO_FLAGS, **ENGINE_GROUPS},
    run=run,
    epilog="qwen-hybrid info --model demo --max-running-requests 16 --json",
)
