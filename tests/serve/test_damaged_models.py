"""Engines over directories of both formats: the same bits when whole, one clear error when not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from qwen_hybrid import HybridConfig, convert_checkpoint, dummy_params, save_hf
from serve import Engine
from tests import tiny_models
from tests.serve.engines import greedy

PROMPT = [5, 6, 7, 8, 9]
FIRST = "model-00001-of-00005.safetensors"
INDEX = "model.safetensors.index.json"
HEADER = (1 << 60).to_bytes(8, "little")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model in both formats, with a tokenizer."""
    root = tmp_path_factory.mktemp("models")
    hf = tiny_models.two_layers("q35_dense") | {"vocab_size": tiny_models.VOCAB_SIZE}
    directory = tiny_models.write_with_tokenizer(root / "hf", hf)
    params = dummy_params(HybridConfig.from_hf(hf), dtype="float32", seed=3)
    save_hf(directory, hf, params, dtype="float32", max_file_bytes=150_000)
    assert (directory / FIRST).is_file()
    convert_checkpoint(directory, root / "orbax")
    return {"hf": directory, "orbax": root / "orbax", "compiled": root / "compiled"}


def start(directory: Path | str, **arguments: Any) -> Any:
    """An engine with the weights that it finds."""
    sizes = {"max_running_requests": 2, "chunked_prefill_size": 14, "context_length": 100}
    return Engine(directory, **(sizes | arguments))


def test_both_formats_give_the_same_bits(models: dict[str, Path]):
    results = []
    for name in ("hf", "orbax"):
        with start(models[name], compilation_cache_dir=models["compiled"]) as engine:
            result = engine.generate(
                input_ids=PROMPT, sampling_params=greedy(20), return_logprob=True
            )
            results.append((result["output_ids"], result["meta_info"]["output_token_logprobs"]))
    assert results[0] == results[1]


def replace(name: str, content: bytes) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        (directory / name).write_bytes(content)

    return change


def cut(name: str, share: float) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        data = (directory / name).read_bytes()
        (directory / name).write_bytes(data[: int(len(data) * share)])

    return change


def remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def edit_tensors(name: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        tensors = safetensors.numpy.load_file(directory / name)
        change(tensors)
        safetensors.numpy.save_file(tensors, directory / name)

    return edit


def edit_json(name: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        content = json.loads((directory / name).read_text())
        change(content)
        (directory / name).write_text(json.dumps(content))

    return edit


def narrow(tensors: dict) -> None:
    """Cut the first matrix by a row."""
    name = next(name for name, value in tensors.items() if value.ndim == 2)
    tensors[name] = np.ascontiguousarray(tensors[name][1:])


HF_DAMAGE = {
    "weights missing": (remove(FIRST), f"{FIRST} does not exist"),
    "weights empty": (replace(FIRST, b""), f"{FIRST} is truncated or not a safetensors file"),
    "weights cut in the header": (cut(FIRST, 0.001), f"{FIRST} is truncated or not"),
    "weights cut in the data": (cut(FIRST, 0.7), f"{FIRST} is truncated: .* ends at byte"),
    "another kind of file": (replace(FIRST, b"PK\3\4" * 99), f"{FIRST} is truncated or not"),
    "a huge header": (replace(FIRST, HEADER * 9), f"{FIRST} is truncated or not"),
    "a broken header": (replace(FIRST, b"\2" + bytes(7) + b"{]"), f"{FIRST} has a broken"),
    "a tensor missing": (
        edit_tensors(FIRST, lambda tensors: tensors.popitem()), f"{FIRST} lacks tensors"
    ),
    "a tensor misshaped": (edit_tensors(FIRST, narrow), f"wrong shapes: .*{FIRST}, expected"),
    "index cut": (cut(INDEX, 0.5), f"{INDEX} is not a checkpoint index"),
    "index of one file less": (
        edit_json(INDEX, lambda c: [
            c["weight_map"].pop(n) for n, f in list(c["weight_map"].items()) if f == FIRST
        ]), f"tensors are missing from .*{INDEX}",
    ),
    "another model's config": (
        edit_json("config.json", lambda c: c.update(hidden_size=128)), "wrong shapes: .*expected",
    ),
}  # fmt: skip
COMMON_DAMAGE = {
    "config missing": (remove("config.json"), "no config.json in"),
    "config cut": (cut("config.json", 0.5), "config.json is not JSON"),
    "config empty": (replace("config.json", b""), "config.json is not JSON: Expecting value"),
    "config not text": (replace("config.json", b"\xff\xfe\0"), "config.json is not JSON: .*codec"),
    "tokenizer missing": (remove("tokenizer.json"), "tokenizer.json"),
    "tokenizer cut": (cut("tokenizer.json", 0.5), "tokenizer.json"),
}
ORBAX_DAMAGE = {
    "no list of tensors": (remove("tensors.json"), "params/_METADATA but no tensors.json"),
    "the list cut": (cut("tensors.json", 0.5), "tensors.json is damaged"),
    "metadata cut": (cut("params/_METADATA", 0.5), "cannot read .* of .*/params: "),
    "parameters gone": (
        lambda directory: shutil.rmtree(directory / "params"), "cannot read .* of .*/params: "
    ),
    "database cut": (cut("params/manifest.ocdbt", 0.5), "cannot read .* of .*/params: .*manifest"),
    "another model's config": (
        edit_json("config.json", lambda c: c.update(hidden_size=128)), "does not fit its config",
    ),
}  # fmt: skip
CASES = [
    (kind, what)
    for kind, damage in (("hf", HF_DAMAGE), ("orbax", ORBAX_DAMAGE))
    for what in damage | COMMON_DAMAGE
]


@pytest.mark.parametrize(("kind", "what"), CASES)
def test_a_damaged_directory(kind: str, what: str, models: dict[str, Path], tmp_path: Path):
    """The message names the directory and the file, on one line, before anything is compiled."""
    directory = Path(shutil.copytree(models[kind], tmp_path / "model"))
    change, message = ((HF_DAMAGE if kind == "hf" else ORBAX_DAMAGE) | COMMON_DAMAGE)[what]
    change(directory)
    with pytest.raises((ValueError, OSError), match=message) as caught:
        start(directory)
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_changed_data_file_of_orbax_is_noticed(models: dict[str, Path], tmp_path: Path):
    """A safetensors file has no checksum; an Orbax directory of ours has one for every tensor."""
    data = [p for p in models["orbax"].rglob("ocdbt.process_0/d/*") if p.stat().st_size > 10_000]
    assert data
    for file in data:
        directory = Path(shutil.copytree(models["orbax"], tmp_path / "model"))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 16
        (directory / file.relative_to(models["orbax"])).write_bytes(content)
        with pytest.raises(ValueError, match=r"is damaged: its bytes have another checksum"):
            start(directory)
        shutil.rmtree(directory)


def test_wrong_paths(models: dict[str, Path], tmp_path: Path):
    weights = next(models["hf"].glob("*.safetensors"))
    for path, message in (
        (tmp_path / "absent", "no model directory"),
        (weights, "is a file; a model is a directory"),
        (tmp_path, "no config.json"),
        (models["orbax"] / "params", "no config.json"),
        ("no-such-model", "nothing is downloaded"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            start(path)
    shutil.copy(models["hf"] / "config.json", tmp_path)
    with pytest.raises((ValueError, OSError), match="must hold an index"):
        start(tmp_path, skip_tokenizer_init=True)
