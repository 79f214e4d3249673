"""The memory report against published numbers and against the formulas in docs/design.md."""

import dataclasses
import math
import re
from typing import Any

import pytest

from pallas_kernels.gated_delta_net import StateDtype
from qwen_hybrid import host_memory
from qwen_hybrid.config import HybridConfig, LayerKind
from qwen_hybrid.memory import KINDS, MemoryReport, memory_report
from qwen_hybrid.state import StateConfig, inventory, state_spec
from serve.engine_config import EngineConfig, resolve
from tests.source_tree import ROOT
from tests.vector_configs import REAL_TEXT, TINY, hf_config

MIB = 1 << 20
ONE = StateConfig(num_slots=1, num_blocks=1, num_state_slots=3, blocks_per_slot=1)


def config_of(name: str) -> HybridConfig:
    """A config from tests/vectors."""
    return HybridConfig.from_hf(hf_config(name))


@dataclasses.dataclass(frozen=True)
class Published:
    """Bytes with activations in bfloat16 and states in float32.

    Source: the key-value, state and convolution shapes of the published configs, as other engines
    state them for these models (27B: 64 KiB a token, 144 MiB of state; 35B-A3B: 20 KiB and 60
    MiB), and the parameter counts of the published index files. Convolution windows: 3 columns
    of every channel; n-gram embeddings: 9 rows of 4 streams of 2560.
    """

    kv: int
    state: int
    conv: int
    mtp_kv: int
    params: int
    index_keys: int = 0
    ple: int = 0


PUBLISHED = {
    "Qwen3.5-0.8B": Published(12_288, 18 * MIB, 663_552, 2_048, 752_393_024),
    "Qwen3.5-2B": Published(12_288, 18 * MIB, 663_552, 2_048, 1_881_825_088),
    "Qwen3.5-4B": Published(32_768, 48 * MIB, 1_179_648, 4_096, 4_205_751_296),
    "Qwen3.5-9B": Published(32_768, 48 * MIB, 1_179_648, 4_096, 8_953_803_264),
    "Qwen3.5-27B": Published(65_536, 144 * MIB, 2_949_120, 4_096, 26_895_998_464),
    "Qwen3.8-27B": Published(65_536, 144 * MIB, 2_949_120, 4_096, 26_895_998_464),
    "Qwen3.5-35B-A3B": Published(20_480, 60 * MIB, 1_474_560, 2_048, 34_660_610_688),
    "Qwen3.6-35B-A3B": Published(20_480, 60 * MIB, 1_474_560, 2_048, 34_660_610_688),
    "Qwen3.8-Flash-Next": Published(
        24_576, 108 * MIB, 2_211_840, 2_048, 176_943_899_520, index_keys=768, ple=184_320
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers(name: str):
    config, published = config_of(name), PUBLISHED[name]
    report = memory_report(config, ONE)
    assert report.unit_bytes("kv") == published.kv
    assert report.unit_bytes("recurrent_state") == published.state
    assert report.conv_window_bytes == published.conv
    assert report.unit_bytes("index_keys") == published.index_keys
    assert report.ple_window_bytes == published.ple
    drafting = memory_report(config, dataclasses.replace(ONE, with_mtp=True))
    assert drafting.unit_bytes("kv") - published.kv == published.mtp_kv
    narrow = memory_report(config, dataclasses.replace(ONE, state_dtype=StateDtype.BFLOAT16))
    assert narrow.unit_bytes("recurrent_state") == published.state / 2
    wide = memory_report(config, dataclasses.replace(ONE, dtype="float32"))
    assert wide.unit_bytes("kv") == 2 * published.kv


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_weights(name: str):
    """Parameters of the text model; a few are float32 in every model."""
    config = dataclasses.replace(config_of(name), num_mtp_layers=0)
    weights = memory_report(config, ONE).weight_bytes
    assert weights["bfloat16"] // 2 + weights["float32"] // 4 == PUBLISHED[name].params
    assert 0 < weights["float32"] < weights["bfloat16"] / 1000
    only = memory_report(config, dataclasses.replace(ONE, dtype="float32"))
    assert only.weight_bytes == {"float32": 4 * PUBLISHED[name].params}
    assert only.num_weight_bytes == 4 * PUBLISHED[name].params


# The formulas.


def documented() -> tuple[dict[str, tuple[str, str, str]], dict[str, str]]:
    """The tables of docs/design.md: (unit, bytes, count) by kind, and the values by name."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| `(\w+)` \| ([\w ]+) \| `([^`]+)` \| (.+) \|$", text, re.MULTILINE)
    values = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|$", text, re.MULTILINE)
    return {line[0]: (line[1], line[2], line[3]) for line in lines}, dict(values)


def names(config: HybridConfig, sc: StateConfig) -> dict[str, Any]:
    """What the formulas speak of."""
    kinds = list(config.layer_kinds)
    if sc.with_mtp:
        kinds.append(LayerKind.QSA if config.hyper_connection else LayerKind.ATTENTION)
    gdn, attention, qsa, ple = config.gdn, config.attention, config.qsa, config.ple
    streams = config.hyper_connection.count if config.hyper_connection else 0
    return {
        "ceil": math.ceil,
        "max": max,
        "gdn_layers": kinds.count(LayerKind.GDN),
        "attention_layers": len(kinds) - kinds.count(LayerKind.GDN),
        "sparse_layers": kinds.count(LayerKind.QSA),
        "ple_layers": len(ple.layers) if ple else 0,
        "Hkv": attention.num_kv_heads,
        "hd": attention.head_dim,
        "Dn": qsa.head_dim if qsa else 0,
        "r": qsa.ratio if qsa else 1,
        "Hk": gdn.num_key_heads,
        "Hv": gdn.num_value_heads,
        "dk": gdn.key_dim,
        "dv": gdn.value_dim,
        "K": gdn.conv_width,
        "C": 2 * gdn.num_key_heads * gdn.key_dim + gdn.num_value_heads * gdn.value_dim,
        "Kn": ple.conv_width if ple else 0,
        "n": ple.ngram_size if ple else 0,
        "streams": streams,
        "D": config.hidden_size,
        "V": config.vocab_size,
        "a": {"float32": 4, "bfloat16": 2}[sc.dtype],
        "s": 2 if sc.state_dtype is StateDtype.BFLOAT16 else 4,
        "B": sc.block_size,
        "W": sc.max_window,
        "blocks": sc.num_blocks,
        "blocks_of_one": sc.blocks_per_slot,
        "slots": sc.num_slots,
    }


def check_formulas(config: HybridConfig, sc: StateConfig, report: MemoryReport) -> None:
    """Work out every documented line and compare it with the report."""
    lines, values = documented()
    known = names(config, sc)
    for name in ("log_rows", "spare_slots", "state_slots"):
        known[name] = eval(values[name], dict(known))
    assert report.num_spare_slots == known["spare_slots"]
    assert {item.kind for item in report.items} <= set(KINDS) <= set(lines)
    for kind, (unit, size, count) in lines.items():
        expected = eval(size, dict(known))
        if kind.endswith("_bytes"):
            assert getattr(report, kind) == expected, kind
            continue
        assert report.unit_bytes(kind) == expected, kind
        for item in report.items:
            if item.kind == kind:
                assert (item.unit, item.count) == (unit, eval(count.strip("`"), dict(known)))
                assert item.num_bytes == expected * item.count


@pytest.mark.parametrize("name", [*TINY, *REAL_TEXT])
@pytest.mark.parametrize("window", [1, 4, 17])
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_formulas(name: str, window: int, dtypes: tuple[str, str]):
    config = config_of(name)
    sc = StateConfig(
        num_slots=9,
        num_blocks=50,
        num_state_slots=12,
        blocks_per_slot=7,
        max_window=window,
        dtype=dtypes[0],
        state_dtype=StateDtype(dtypes[1]),
        with_mtp=config.num_mtp_layers > 0,
    )
    report = memory_report(config, sc)
    check_formulas(config, sc, report)
    # Nothing is left out, and nothing counted twice.
    arrays = sum(entry.num_bytes for entry in inventory(state_spec(config, sc)))
    assert report.num_state_bytes == arrays + 9 * config.vocab_size * 8


@pytest.mark.parametrize("slots", [1, 8, 9, 64])
@pytest.mark.parametrize("name", ["q4_all", "Qwen3.8-27B"])
def test_what_an_engine_would_take(name: str, slots: int, monkeypatch: pytest.MonkeyPatch):
    """The pools of an engine have the documented numbers of slots, within its budget."""
    monkeypatch.setattr(host_memory, "available_bytes", lambda: None)
    config, budget = config_of(name), 20_000_000_000
    engine = EngineConfig(max_running_requests=slots, context_length=1000, memory_bytes=budget)
    sc = resolve(engine, config, "bfloat16")
    report = memory_report(config, sc)
    check_formulas(config, sc, report)
    assert report.num_state_bytes <= budget


def test_a_report_allocates_nothing():
    """Of a model and a state that no machine holds."""
    sc = StateConfig(
        num_slots=1 << 16, num_blocks=1 << 24, num_state_slots=1 << 20, blocks_per_slot=4096
    )
    report = memory_report(config_of("Qwen3.8-Flash-Next"), sc)
    assert report.num_state_bytes > 1e14
    assert report.num_weight_bytes > 3e11
