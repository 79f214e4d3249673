"""Training a drafter: losses by hand, a run on a toy target, a run that is cut and goes on."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import demo_tokenizer, dspark_quality, train_dspark
from examples.demo_data import Dataset
from examples.dspark_losses import (
    Acceptance,
    BlockTerms,
    Pair,
    draft_loss,
    draw_anchors,
)
from examples.dspark_models import Sizes, draft_config, tapped_layers
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.dspark_config import DSparkConfig
from qwen_hybrid.model import HybridModel
from qwen_hybrid.weights import dummy_params, save_hf
from spec.dspark import load_draft, read_draft_config, save_draft
from tests.oracles.dspark import NumpyDrafter
from tests.tiny_models import two_layers
from tests.tolerances import FLOAT32

VOCAB_SIZE = 320
END = 5
SIZES = ["--layers", "1", "--intermediate", "32", "--rank", "8", "--heads", "2"]
SIZES += ["--block-size", "4"]
RUN = ["--batch", "4", "--length", "48", "--anchors", "8", "--peak-rate", "1e-2"]


def terms(rng: np.random.Generator, shape=(2, 3, 4)) -> BlockTerms:
    return BlockTerms(
        cross_entropy=jnp.asarray(rng.uniform(0, 9, shape), jnp.float32),
        distance=jnp.asarray(rng.uniform(0, 2, shape), jnp.float32),
        confidence=jnp.asarray(rng.normal(size=shape), jnp.float32),
        agrees=jnp.asarray(rng.random(shape) < 0.7),
        counts=jnp.asarray(np.cumprod(rng.random(shape) < 0.9, axis=2) > 0),
    )


def test_loss_is_the_weighted_mean_over_drafts_that_count(rng: np.random.Generator):
    given = terms(rng)
    total, _ = draft_loss(given)
    sums, weights = np.zeros(3), 0.0
    for place in np.ndindex(2, 3, 4):
        if not given.counts[place]:
            continue
        weight = np.exp(-place[2] / 4.0)
        kept = 1.0 - 0.5 * float(given.distance[place])
        said = 1.0 / (1.0 + np.exp(-float(given.confidence[place])))
        entropy = -(kept * np.log(said) + (1.0 - kept) * np.log(1.0 - said))
        sums += weight * np.array(
            [float(given.cross_entropy[place]), float(given.distance[place]), entropy]
        )
        weights += weight
    assert float(total) == pytest.approx(sums @ [0.1, 0.9, 1.0] / weights, rel=1e-5)


def test_confidence_does_not_train_what_it_predicts(rng: np.random.Generator):
    given = terms(rng)
    only_confidence = jax.grad(lambda t: draft_loss(t)[1]["confidence"], allow_int=True)(given)
    assert not np.any(only_confidence.distance)
    assert np.any(only_confidence.confidence)


def test_anchors_are_distinct_and_leave_room():
    anchors = draw_anchors(jax.random.key(0), batch=50, length=12, count=9, block=4)
    assert all(len(set(row)) == 9 for row in anchors.tolist())
    assert set(np.asarray(anchors).ravel()) == set(range(9))


def test_monitors_by_hand():
    # Two blocks of three drafts; a text ends before the last draft of the second.
    record = Acceptance.of(
        BlockTerms(
            cross_entropy=jnp.zeros((1, 2, 3)),
            distance=jnp.asarray([[[0.0, 1.0, 2.0], [1.0, 0.0, 0.0]]]),
            confidence=jnp.zeros((1, 2, 3)),
            agrees=jnp.asarray([[[True, False, True], [True, True, True]]]),
            counts=jnp.asarray([[[True, True, True], [True, True, False]]]),
        )
    ).record()
    chances = [0.75, 0.75, 0.0]
    assert [record[f"kept_{k}"] for k in (1, 2, 3)] == chances
    assert record["tau"] == pytest.approx(1.0 + 0.75 + 0.75**2)
    assert [record[f"agreed_{k}"] for k in (1, 2, 3)] == [1.0, 0.5, 0.0]
    assert record["greedy_tau"] == pytest.approx(2.5)
    assert record["confidence_bias"] == pytest.approx((5 * 0.5 - 3.0) / 5)


def test_rounds_by_hand():
    said = np.array([3, 1, 4, 1, 5, 9, 2])
    drafts = np.zeros((7, 3), int)
    drafts[0] = [1, 4, 7]
    drafts[3] = [7, 9, 2]
    drafts[4] = [9, 2, 0]
    # Two drafts and 1; then 5 alone; then 9, and the last token is the target's own.
    assert dspark_quality.walk(drafts, said) == [2, 0, 1]
    assert dspark_quality.accept_length([[2, 0, 1]]) == 2.0
    assert dspark_quality.distinct_share(np.array([1, 2, 1, 2, 1, 2, 1])) == 0.5


def test_small_targets_are_tapped_where_they_can_be():
    assert [tapped_layers(n) for n in (1, 2, 8)] == [[0], [0, 1], [1, 4, 6]]


def dataset() -> Dataset:
    text = Path(train_dspark.__file__).read_text()
    tokenizer = demo_tokenizer.train_tokenizer([text], VOCAB_SIZE)
    tokens = np.asarray(tokenizer.encode(text).ids, np.uint16)
    starts = np.array([0, len(tokens) // 3, len(tokens)])
    provenance = {
        "name": "x",
        "version": "1",
        "licence": "y",
        "files": 1,
        "bytes": 2,
        "sha256": "z",
    }
    return Dataset(tokens, starts, tokens[:600], text, provenance, tokenizer)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus in `data` and an untrained target in `target`."""
    root = tmp_path_factory.mktemp("training")
    hf_config = two_layers("q35_dense") | {"vocab_size": VOCAB_SIZE, "eos_token_id": END}
    params = dummy_params(HybridConfig.from_hf(hf_config), dtype="float32", progress=False)
    save_hf(root / "target", hf_config, params, dtype="float32")
    data = dataset()
    data.save(root / "data")
    data.tokenizer.save(str(root / "target" / "tokenizer.json"))
    return root


def trainer(root: Path, out: str, *options: str) -> train_dspark.Trainer:
    where = ["--target", str(root / "target"), "--data", str(root / "data")]
    return train_dspark.Trainer(
        train_dspark.parse_arguments([*where, "--out", str(root / out), *SIZES, *RUN, *options])
    )


@pytest.fixture
def mixed_types():
    """Let types mix: the optimizer's own code does."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.usefixtures("mixed_types")
def test_training_lowers_the_loss_and_goes_on_where_it_was_cut(folders: Path, monkeypatch):
    schedule = ["--steps", "30", "--report-every", "15"]
    whole = trainer(folders, "whole", *schedule)
    whole.run()
    first, last = whole.progress.log
    assert last["distance"] < first["distance"] < 2.0
    assert last["tau"] > first["tau"] > 1.0

    cut = trainer(folders, "cut", *schedule, "--checkpoint", str(folders / "orbax"))
    with monkeypatch.context() as patch:
        at = cut.batches.at

        def lost(step: int) -> np.ndarray:
            if step == 20:
                raise RuntimeError("power cut")
            return at(step)

        patch.setattr(cut.batches, "at", lost)
        with pytest.raises(RuntimeError, match="power cut"):
            cut.run()
    # The drafter of the last report is there.
    so_far = load_draft(folders / "cut", cut.pair.draft, dtype="bfloat16")
    assert jax.tree.structure(so_far) == jax.tree.structure(whole.draft)
    resumed = trainer(folders, "cut", *schedule, "--checkpoint", str(folders / "orbax"))
    assert resumed.progress.step == 15
    resumed.run()
    jax.tree.map(np.testing.assert_array_equal, resumed.draft, whole.draft)
    for name in ("config.json", "model.safetensors"):
        assert (folders / "cut" / name).read_bytes() == (folders / "whole" / name).read_bytes()

    config = read_draft_config(folders / "whole")
    config.check_target(HybridConfig.from_directory(folders / "target"))
    load_draft(folders / "whole", config, dtype="bfloat16")
    assert json.loads((folders / "whole" / "config.json").read_text())["target_model"]
    card = (folders / "whole" / "README.md").read_text()
    assert "{" not in card and "--steps 30" in card and "--layers 1" in card


def test_terms_equal_float64(folders: Path, rng: np.random.Generator):
    target = HybridConfig.from_directory(folders / "target")
    params = dummy_params(target, dtype="float32", progress=False)
    hf_config = draft_config(target, "t", 6, Sizes(block_size=3, layers=1, intermediate=32, rank=4))
    pair = Pair(DSparkConfig.from_hf(hf_config), target, END)
    draft = train_dspark.initial_draft(pair.draft, 0)
    save_draft(folders / "start", hf_config, draft, dtype="float32")
    ids = rng.integers(10, VOCAB_SIZE, (2, 21))
    ids[0, 8] = END
    anchors = np.array([[0, 7, 17], [1, 2, 11]])
    arrays = (jnp.asarray(ids), jnp.asarray(anchors))
    got = train_dspark.TERMS_OF(pair, params, draft, *arrays)
    # A text that ends at token 8 leaves room for the first two drafts after token 7: what follows
    # an end is another text.
    counts = np.ones((2, 3, 3), bool)
    counts[0, 1, 1:] = False
    np.testing.assert_array_equal(got.counts, counts)
    model = HybridModel(target, tap_layers=pair.draft.target_layer_ids)
    read = jax.jit(lambda p, i: model.apply({"params": p}, i, method="sequence"))(
        params, jnp.asarray(ids[:, :-1])
    )
    table = np.asarray(params["embed_tokens"])
    oracle = NumpyDrafter(folders / "start", table, np.asarray(params.get("lm_head", table)))
    for row, place in np.ndindex(2, 3):
        at = anchors[row, place]
        follow = ids[row, at + 1 : at + 4]
        taps = np.asarray(read.taps[row, :at], np.float64)
        drafted = oracle.block(taps, int(ids[row, at]), follow)
        logits = np.asarray(read.logits[row, at : at + 3], np.float64)
        p, q = (np.exp(x - x.max(-1, keepdims=True)) for x in (drafted.logits, logits))
        p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
        limits = {"rtol": 0, "atol": FLOAT32.max_difference}
        np.testing.assert_allclose(got.distance[row, place], np.abs(p - q).sum(-1), **limits)
        best = q.argmax(-1)
        np.testing.assert_allclose(
            got.cross_entropy[row, place], -np.log(p[np.arange(3), best]), **limits
        )
        np.testing.assert_array_equal(got.agrees[row, place], p.argmax(-1) == best)
        np.testing.assert_allclose(got.confidence[row, place], drafted.confidence, **limits)


def test_another_corpus_is_refused(folders: Path, tmp_path: Path):
    data = dataset()
    other = demo_tokenizer.train_tokenizer(["some other text entirely"], 300)
    Dataset(data.tokens, data.starts, data.heldout, data.heldout_text, data.provenance, other).save(
        tmp_path / "data"
    )
    with pytest.raises(ValueError, match="corpus was not made with .*tokenizer.json"):
        trainer(folders, "x", "--data", str(tmp_path / "data"))


def test_rollouts_are_mixed_in(folders: Path, tmp_path: Path):
    rows = np.full((3, 49), 17, np.int32)
    np.savez(tmp_path / "1.npz", windows=rows)
    batches = trainer(folders, "x", "--rollouts", str(tmp_path), "--share", "0.5").batches
    batch = batches.at(2)
    assert batch.shape == (4, 49)
    assert (batch[2:] == 17).all() and not (batch[:2] == 17).all(1).any()
    with pytest.raises(ValueError, match="holds rows of 49 tokens"):
        trainer(folders, "x", "--rollouts", str(tmp_path), "--length", "32")
