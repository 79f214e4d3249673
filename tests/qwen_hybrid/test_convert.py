"""Model directories to Orbax and back: bytes, checksums, damage, interruptions, memory."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.torch
import torch

from qwen_hybrid import checkpoint_orbax, convert, host_memory
from qwen_hybrid.checkpoint_files import TensorReader, read_directory
from qwen_hybrid.convert import Format, convert_checkpoint
from qwen_hybrid.params import ParamTree, leaves
from qwen_hybrid.weights import CheckpointError, dummy_params, load_checkpoint, save_hf
from tests.oracles.recipe import CONFIG_NAMES, Checkpoints
from tests.source_tree import ROOT
from tests.vector_configs import hf_config

# Where one of several arrays cannot be read, Orbax closes its event loop while other threads still
# read; what they then raise in nobody's hands, Python reports as unraisable.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

State = dict[str, torch.Tensor]
TEXTS = {"tokenizer.json": b'{"a": 1}\n', "chat_template.jinja": "{{ x }} é\n".encode(), "x": b"\0"}


def tensors_of(directory: Path) -> State:
    """Every tensor of a directory, as the safetensors library reads it."""
    files = [safetensors.torch.load_file(path) for path in directory.glob("*.safetensors")]
    return {name: tensor for file in files for name, tensor in file.items()}


def assert_same_tensors(found: State, expected: State) -> None:
    """Check names, dtypes, shapes and bytes."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(as_bytes(found[name]), as_bytes(tensor)), name


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same_params(first: ParamTree, second: ParamTree) -> None:
    """Check dtypes and bytes of two trees."""
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for (path, a), (_, b) in zip(leaves(first), leaves(second), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


def odd_directory(source: Path, directory: Path) -> Path:
    """A checkpoint whose tensors lie in three files in several dtypes, with more than the model."""
    state = tensors_of(source)
    for name, tensor in state.items():
        if name.endswith(("A_log", "gate.weight")):
            state[name] = tensor.float()
        elif name.endswith("experts.1.up_proj.weight"):
            # Half of what one parameter is made of.
            state[name] = (tensor.float() * 1.001).half()
    state |= {
        "model.visual.patch.weight": torch.randn(5, 3, dtype=torch.float64),
        "model.visual.table": torch.randint(0, 255, (7,), dtype=torch.uint8),
        "model.visual.empty": torch.zeros(0, 4),
        "model.visual.scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "model.rotary_emb.inv_freq": torch.randn(3),
        "model.visual.small": torch.randn(3).to(torch.float8_e4m3fn),
    }
    directory.mkdir()
    shutil.copy(source / "config.json", directory)
    weight_map = {}
    for number in range(3):
        part = dict(list(state.items())[number::3])
        file_name = f"part-{number}.safetensors"
        safetensors.torch.save_file(part, directory / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def source(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint with an MTP head, n-gram tables, experts and files that are no weights."""
    directory = tmp_path_factory.mktemp("source") / "model"
    shutil.copytree(checkpoints.directory("q4_all", "bfloat16", mtp=True), directory)
    for name, content in TEXTS.items():
        (directory / name).write_bytes(content)
    return directory


@pytest.fixture(scope="module")
def orbax(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in the other format."""
    directory = tmp_path_factory.mktemp("orbax") / "model"
    assert convert_checkpoint(source, directory).written is Format.ORBAX
    return directory


@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_round_trip(name: str, checkpoints: Checkpoints, tmp_path: Path):
    """Split experts, sharded tables, MTP heads, tied heads: everything keeps name and bytes."""
    directory = checkpoints.directory(name, "bfloat16", mtp=name in ("q4_odd", "q35_moe"))
    there = convert_checkpoint(directory, tmp_path / "orbax")
    back = convert_checkpoint(tmp_path / "orbax", tmp_path / "back")
    assert (there.written, back.written) == (Format.ORBAX, Format.HUGGING_FACE)
    expected = tensors_of(directory)
    assert_same_tensors(tensors_of(tmp_path / "back"), expected)
    size = sum(tensor.nbytes for tensor in expected.values())
    assert there.num_tensors == back.num_tensors == len(expected)
    assert there.num_bytes == back.num_bytes == size
    loaded, other = load_checkpoint(directory), load_checkpoint(tmp_path / "orbax")
    assert_same_params(other.params, loaded.params)
    assert other.config == loaded.config
    assert len(other.notes) == len(loaded.notes)


def test_round_trip_of_odd_dtypes_and_files(source: Path, tmp_path: Path):
    directory = odd_directory(source, tmp_path / "odd")
    expected = tensors_of(directory)
    assert {tensor.dtype for tensor in expected.values()} >= {torch.float16, torch.float8_e4m3fn}
    convert_checkpoint(directory, tmp_path / "orbax")
    convert_checkpoint(tmp_path / "orbax", tmp_path / "back", max_file_bytes=300_000)
    files = sorted(path.name for path in (tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert max((tmp_path / "back" / name).stat().st_size for name in files) < 320_000
    assert_same_tensors(tensors_of(tmp_path / "back"), expected)
    # Our own reader goes by the index, and checks every header.
    _, entries = read_directory(tmp_path / "back")
    assert len(entries) == len(expected)
    with TensorReader() as reader:
        for name, entry in entries.items():
            assert reader.raw(entry).tobytes() == as_bytes(expected[name]).numpy().tobytes()
    for dtype in ("float32", "bfloat16", "auto"):
        loaded = load_checkpoint(directory, dtype=dtype)
        other = load_checkpoint(tmp_path / "orbax", dtype=dtype)
        assert_same_params(other.params, loaded.params)


def test_other_files_travel_along(source: Path, orbax: Path, tmp_path: Path):
    convert_checkpoint(orbax, tmp_path / "back")
    config = (source / "config.json").read_bytes()
    for directory in (orbax, tmp_path / "back"):
        for name, content in (TEXTS | {"config.json": config}).items():
            assert (directory / name).read_bytes() == content
    assert not list(orbax.glob("*.safetensors*"))
    assert not (tmp_path / "back" / checkpoint_orbax.MANIFEST).exists()


def test_orbax_alone_reads_the_parameters(orbax: Path):
    """The parameters are an ordinary Orbax checkpoint, for whoever has no use for this package."""
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore((orbax / "params").absolute())
    params = load_checkpoint(orbax).params
    for path, value in leaves(found):
        stored = np.asarray(dict(leaves(params))[path])
        np.testing.assert_array_equal(np.asarray(value).astype(stored.dtype), stored)
    assert jax.tree.structure(found) == jax.tree.structure(params)


def test_a_head_that_the_config_does_not_announce(source: Path, orbax: Path, tmp_path: Path):
    """It is kept as it is, and loading says that it is ignored, before and after."""
    shutil.copytree(source, tmp_path / "plain")
    path = tmp_path / "plain" / "config.json"
    content = json.loads(path.read_text())
    for part in (content, content.get("text_config", {})):
        for key in ("num_mtp_layers", "mtp_num_hidden_layers", "mtp_layer_types"):
            part.pop(key, None)
    path.write_text(json.dumps(content))
    expected = load_checkpoint(tmp_path / "plain")
    assert "ignored 31 mtp" in expected.notes[0]
    convert_checkpoint(tmp_path / "plain", tmp_path / "orbax")
    for directory in (tmp_path / "orbax", orbax):
        loaded = load_checkpoint(directory, expected.config)
        assert_same_params(loaded.params, expected.params)
        assert loaded.notes == expected.notes
    convert_checkpoint(tmp_path / "orbax", tmp_path / "back")
    assert_same_tensors(tensors_of(tmp_path / "back"), tensors_of(source))


# Damage.


def broken(path: Path, how: str) -> None:
    """Damage one file."""
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
        return
    if how == "truncated":
        del data[len(data) // 2 :]
    elif how == "empty":
        data.clear()
    else:
        data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture
def copy(orbax: Path, tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    return Path(shutil.copytree(orbax, tmp_path / "copy"))


def weight_files(directory: Path) -> list[Path]:
    """The files below a checkpoint that are not text."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return sorted(path.relative_to(directory) for path in files if path.parent != directory)


@pytest.mark.parametrize("how", ["missing", "truncated", "empty", "changed"])
def test_damage_is_an_error_or_changes_nothing(how: str, checkpoints: Checkpoints, tmp_path: Path):
    """Every file of a checkpoint in turn. Orbax does not need all of them to restore."""
    convert_checkpoint(checkpoints.directory("q35_dense", "bfloat16"), tmp_path / "orbax")
    expected = load_checkpoint(tmp_path / "orbax").params
    num_errors = 0
    for file in weight_files(tmp_path / "orbax"):
        copy = Path(shutil.copytree(tmp_path / "orbax", tmp_path / "copy"))
        broken(copy / file, how)
        try:
            found = load_checkpoint(copy).params
        except CheckpointError as error:
            num_errors += 1
            assert str(copy) in str(error) and "\n" not in str(error)
        else:
            assert_same_params(found, expected)
        shutil.rmtree(copy)
    assert num_errors >= 3


def places(copy: Path, values: np.ndarray) -> list[tuple[Path, int]]:
    """The data file that a parameter lies in, and where; none if Orbax holds it elsewhere."""
    found = (
        (file, (copy / file).read_bytes().find(values.tobytes())) for file in weight_files(copy)
    )
    return [(copy / file, at) for file, at in found if at >= 0]


@pytest.mark.parametrize("path", [("layers_0", "mlp", "gate"), ("lm_head",)])
def test_one_changed_bit_is_named(path: tuple[str, ...], copy: Path, tmp_path: Path):
    values = np.asarray(dict(leaves(load_checkpoint(copy).params))[path])
    [(file, at)] = places(copy, values)
    data = bytearray(file.read_bytes())
    data[at + values.nbytes - 1] ^= 4
    file.write_bytes(data)
    name = "/".join(path)
    with pytest.raises(CheckpointError, match=f"{name} of {copy}/params is damaged.*checksum"):
        load_checkpoint(copy)
    with pytest.raises(CheckpointError, match=f"{name} of .*checksum"):
        convert_checkpoint(copy, tmp_path / "back")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy"]


def test_an_unreadable_tensor_is_named(copy: Path):
    """The last array of a file that was cut short."""
    files = {}
    for path, leaf in leaves(load_checkpoint(copy).params):
        for file, at in places(copy, np.asarray(leaf)):
            files[file] = max(files.get(file, (0, "")), (at, "/".join(path)))
    file, (at, name) = max(files.items(), key=lambda item: item[0].stat().st_size)
    file.write_bytes(file.read_bytes()[: at + 1])
    with pytest.raises(CheckpointError, match=rf"cannot read {name} of {copy}/params: .*\w"):
        load_checkpoint(copy)


def test_swapped_contents_are_noticed(copy: Path, checkpoints: Checkpoints, tmp_path: Path):
    """The parameters of another model of the same shapes."""
    other = tmp_path / "other"
    state = tensors_of(checkpoints.directory("q4_all", "bfloat16", mtp=True))
    other.mkdir()
    shutil.copy(copy / "config.json", other)
    name = next(name for name in state if name.endswith("embed_tokens.weight"))
    state[name] = state[name] + 1
    safetensors.torch.save_file(state, other / "model.safetensors")
    convert_checkpoint(other, tmp_path / "other-orbax")
    shutil.rmtree(copy / "params")
    shutil.move(tmp_path / "other-orbax" / "params", copy / "params")
    with pytest.raises(CheckpointError, match="embed_tokens of .*checksum"):
        load_checkpoint(copy)


def edit(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format="other"), "is of format other version 1"),
        (lambda c: c.update(version=2), "version 2, not qwen-hybrid-orbax 1"),
        (lambda c: c.pop("version"), "is damaged: KeyError"),
        (lambda c: c["tensors"].pop(), "its content has another checksum"),
        (lambda c: c["params"]["lm_head"].update(sha256="0" * 64), "another checksum"),
        (lambda c: c.clear(), "is damaged: KeyError"),
    ],
)
def test_a_changed_manifest(change: Callable[[dict], object], message: str, copy: Path):
    edit(copy / "tensors.json", change)
    with pytest.raises(CheckpointError, match=rf"{copy}/tensors\.json .*{message}"):
        load_checkpoint(copy)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"format": 1}'])
def test_a_broken_manifest(content: bytes, copy: Path):
    (copy / "tensors.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tensors\.json is damaged"):
        load_checkpoint(copy)


def test_a_config_of_another_model(copy: Path, tmp_path: Path):
    edit(copy / "config.json", lambda c: c.update(vocab_size=c["vocab_size"] + 1))
    with pytest.raises(CheckpointError, match=r"does not fit its config: .*embed_tokens \[320"):
        load_checkpoint(copy)
    edit(copy / "config.json", lambda c: c.update(vocab_size=320, seed=99, ple_seed=99))
    with pytest.raises(CheckpointError, match="layer_multipliers of .*the config's n-gram hash"):
        load_checkpoint(copy)


def test_foreign_and_incomplete_directories(copy: Path, tmp_path: Path):
    (copy / "tensors.json").rename(tmp_path / "kept.json")
    with pytest.raises(CheckpointError, match=r"params/_METADATA but no tensors\.json"):
        load_checkpoint(copy)
    with pytest.raises(CheckpointError, match=r"no tensors\.json"):
        convert_checkpoint(copy, tmp_path / "back")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((tmp_path / "foreign").absolute(), {"w": np.zeros(3)})
    shutil.copy(copy / "config.json", tmp_path / "foreign")
    with pytest.raises(CheckpointError, match=r"foreign has _METADATA but no tensors\.json"):
        load_checkpoint(tmp_path / "foreign")
    (tmp_path / "kept.json").rename(copy / "tensors.json")
    safetensors.torch.save_file({"w": torch.zeros(1)}, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"both tensors\.json and \*\.safetensors"):
        load_checkpoint(copy)


def test_wrong_paths(source: Path, orbax: Path, tmp_path: Path):
    with pytest.raises(CheckpointError, match="absent is not a directory"):
        convert_checkpoint(tmp_path / "absent", tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"config\.json is not a directory"):
        convert_checkpoint(source / "config.json", tmp_path / "out")
    with pytest.raises(FileExistsError, match="exists; convert writes a new directory"):
        convert_checkpoint(source, orbax)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        convert_checkpoint(tmp_path / "empty", tmp_path / "out")
    shutil.copy(source / "config.json", tmp_path / "empty")
    with pytest.raises(CheckpointError, match="must hold an index"):
        convert_checkpoint(tmp_path / "empty", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_no_room(source: Path, orbax: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 1000)
    with pytest.raises(MemoryError, match="converting .* needs .* 1,000 bytes are available"):
        convert_checkpoint(source, tmp_path / "out")
    monkeypatch.undo()
    usage = shutil._ntuple_diskusage(10**9, 10**9, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    for directory in (source, orbax):
        with pytest.raises(OSError, match=r"no room for .*out: .* needed, 1\.0 kB free"):
            convert_checkpoint(directory, tmp_path / "out")
    assert not list(tmp_path.iterdir())


# Interruptions.

KILL = """
import os, signal, sys
from pathlib import Path
from qwen_hybrid import checkpoint_orbax, convert
from qwen_hybrid.checkpoint_writer import FileWriter
module = {"Path": Path, "FileWriter": FileWriter, "orbax": checkpoint_orbax, "convert": convert}
where, name, count, source, destination = sys.argv[1:]
plain, left = getattr(module[where], name), int(count)

def dying(*args, **kwargs):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(*args, **kwargs)

setattr(module[where], name, dying)
convert.convert_checkpoint(source, destination)
"""
# Where the process dies, and after how many calls: early, in the middle, before the very end.
TO_ORBAX = [
    ("convert", "read_param", 5), ("orbax", "_save_tree", 1), ("orbax", "checksum", 3),
    ("Path", "write_text", 0), ("Path", "rename", 0),
]  # fmt: skip
BACK = [
    ("FileWriter", "write", 200), ("FileWriter", "finish", 0),
    ("convert", "_copy_other_files", 0), ("Path", "rename", 1),
]  # fmt: skip


@pytest.mark.parametrize(("where", "name", "count"), TO_ORBAX + BACK)
def test_killed(where: str, name: str, count: int, source: Path, orbax: Path, tmp_path: Path):
    """Whatever is left under the destination's name or beside it does not load."""
    directory = source if (where, name, count) in TO_ORBAX else orbax
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILL, where, name, str(count), str(directory), str(out)]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not out.exists()
    partial = tmp_path / "out.partial"
    # At the last rename nothing but the name is missing.
    if name != "rename":
        with pytest.raises((CheckpointError, FileNotFoundError)):
            load_checkpoint(partial)
    with pytest.raises(FileExistsError, match=r"out\.partial exists: a conversion to out"):
        convert_checkpoint(directory, out)
    shutil.rmtree(partial)
    convert_checkpoint(directory, out)
    assert_same_params(load_checkpoint(out).params, load_checkpoint(orbax).params)


@pytest.mark.parametrize("where", ["_copy_other_files", "_read_params", "_source_tensors"])
def test_an_exception_leaves_nothing(
    where: str, source: Path, orbax: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, where, interrupted)
    directory = orbax if where == "_source_tensors" else source
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(directory, tmp_path / "out")
    assert not list(tmp_path.iterdir())


# Memory and placement.


@contextlib.contextmanager
def child(code: str, *arguments: object, flags: str = "") -> Iterator[str]:
    """The output of a process that ran some code."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    yield subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout


# Layers being read or written, and what an allocator keeps.
IN_FLIGHT_BYTES = 120_000_000
PEAK = """
import re, sys
from pathlib import Path
import jax, jax.numpy as jnp
from qwen_hybrid import convert_checkpoint, load_checkpoint
jnp.zeros(3).block_until_ready()
convert_checkpoint(sys.argv[1], sys.argv[1] + "-warm-" + sys.argv[2])
def peak():
    # Unlike getrusage, this knows nothing of the parent.
    text = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+(\\d+)", text)[1]) * 1024
before = peak()
result = {"convert": lambda: convert_checkpoint(sys.argv[3], sys.argv[4]),
          "load": lambda: load_checkpoint(sys.argv[3])}[sys.argv[2]]()
print(peak() - before)
"""


# What is in flight at once depends on what else the machine does: it needs one to itself.
@pytest.mark.full
def test_memory_stays_near_one_copy(tmp_path: Path):
    """Beside it: some layers in flight, and on the way back no copy at all."""
    sizes = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 8}
    hf = hf_config("q35_dense") | sizes
    hf |= {"layer_types": ["linear_attention"] * 7 + ["full_attention"]}
    small = hf | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 8}
    for name, config in (("large", hf), ("small", small)):
        model = convert.HybridConfig.from_hf(config)
        params = dummy_params(model, dtype="float32")
        save_hf(tmp_path / name, config, params, dtype="float32")
    size = sum(path.stat().st_size for path in (tmp_path / "large").iterdir())
    assert size > 200_000_000
    there, back = tmp_path / "there", tmp_path / "back"
    runs = [("convert", tmp_path / "large", there), ("convert", there, back), ("load", there)]
    for (what, *paths), copies in zip(runs, (1.1, 0, 1.1), strict=True):
        with child(PEAK, tmp_path / "small", what, *paths) as out:
            assert int(out) < copies * size + IN_FLIGHT_BYTES, (what, int(out), size)
        for extra in tmp_path.glob("small-warm-*"):
            shutil.rmtree(extra)


SHARDED = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from qwen_hybrid import load_checkpoint
mesh = Mesh(np.array(jax.devices()), ("x",))
def placement(spec):
    axes = ["x" if size % 4 == 0 else None for size in spec.shape]
    first = axes.index("x") if "x" in axes else len(axes)
    return NamedSharding(mesh, PartitionSpec(*[None] * first, *axes[first:first + 1]))
def load(path):
    return load_checkpoint(path, placement=placement, dtype=sys.argv[3]).params
trees = [load(path) for path in sys.argv[1:3]]
num_cut = 0
for a, b in zip(*map(jax.tree.leaves, trees), strict=True):
    assert a.sharding == b.sharding and len(b.addressable_shards) == 4
    num_cut += b.addressable_shards[0].data.size < b.size
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
print(num_cut)
"""


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_sharded_restore(dtype: str, source: Path, orbax: Path):
    """Four devices: each array lies where it was asked for, with the bytes of the other format."""
    flags = "--xla_force_host_platform_device_count=4"
    with child(SHARDED, source, orbax, dtype, flags=flags) as out:
        assert int(out) > 50
