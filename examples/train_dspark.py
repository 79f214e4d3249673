"""Train a DSpark drafter for a demo model on the corpus that `examples.demo_data` made.

    python -m examples.demo_data --out .carry/demo
    python -m examples.train_dspark --target demo --minutes 6 --out out/demo-dspark
    python -m examples.dspark_quality --draft out/demo-dspark

The corpus is made once, from the standard library of the Python that the demos were trained on, and
its folder copied to where the training runs. The target is frozen; the drafter learns the target's
own distributions (`examples.dspark_losses`) at random places of the text. The learning rate follows
a cosine over the budget, `--minutes` or `--steps`. A run that is cut short (`--stop-after`)
continues from its Orbax checkpoint; a budget in steps then gives the very same parameters.
"""

import argparse
import functools
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from tokenizers import Tokenizer

from examples import demo_corpus
from examples.demo_data import Dataset, epoch_windows, token_windows
from examples.dspark_losses import (
    CE_WEIGHT,
    Acceptance,
    Pair,
    block_terms,
    draft_loss,
    draw_anchors,
)
from examples.dspark_models import Sizes, draft_config, target_directory
from examples.train_demo import Progress
from qwen_hybrid.dspark_config import DSparkConfig
from qwen_hybrid.params import (
    ParamTree,
    abstract_params,
    leaves,
    model_specs,
    num_params,
    set_leaf,
)
from qwen_hybrid.weights import load_checkpoint
from spec.dspark import dspark_specs, random_draft, save_draft

MASK = "<|mask|>"
WARMUP = 0.04
FLOOR = 0.02
OUTPUT_PROJECTIONS = ("o_proj", "down_proj")
# Blocks in each held-out text.
HELDOUT_ANCHORS = 32
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.95))
TERMS_OF = jax.jit(block_terms, static_argnums=0)
CARD = Path(__file__).parent / "dspark_card.md"


def initial_draft(config: DSparkConfig, seed: int) -> ParamTree:
    """Return float32 parameters: small projections into the residual, no bias by the last token."""
    scale = (2.0 * config.num_layers) ** -0.5
    params: ParamTree = {}
    for path, value in leaves(random_draft(config, jax.random.key(seed), dtype="float32")):
        value = value * scale if path[-1] in OUTPUT_PROJECTIONS else value
        set_leaf(params, path, jnp.zeros_like(value) if path[-1] == "markov_w2" else value)
    return params


class Batches:
    """Batches of text, each a function of the seed and its number alone."""

    def __init__(
        self, dataset: Dataset, rollouts: np.ndarray | None, arguments: argparse.Namespace
    ) -> None:
        self._dataset, self._rollouts = dataset, rollouts
        self._length, self._seed = arguments.length, arguments.seed
        self._num_rollouts = 0 if rollouts is None else round(arguments.share * arguments.batch)
        self._num_texts = arguments.batch - self._num_rollouts
        if rollouts is not None and rollouts.shape[1] != arguments.length + 1:
            raise ValueError(
                f"--rollouts holds rows of {rollouts.shape[1]} tokens, --length needs "
                f"{arguments.length + 1}"
            )
        # Every epoch has the same tokens, so the same number of windows.
        num_windows = (len(dataset.tokens) - 1) // arguments.length
        self._per_epoch = num_windows // max(self._num_texts, 1)
        if not self._per_epoch:
            raise ValueError(f"{num_windows} windows of text do not fill one batch")

    def at(self, step: int) -> np.ndarray:
        """Return batch `step`, rows of length + 1 tokens."""
        epoch, index = divmod(step, self._per_epoch)
        start = index * self._num_texts
        rows = self._epoch(epoch)[start : start + self._num_texts]
        if self._rollouts is None:
            return rows
        rng = np.random.default_rng([self._seed, step])
        return np.concatenate([rows, rng.choice(self._rollouts, self._num_rollouts)])

    # Making an epoch's windows takes a second.
    @functools.lru_cache(maxsize=1)  # noqa: B019, one object lives as long as the program
    def _epoch(self, epoch: int) -> np.ndarray:
        windows = epoch_windows(self._dataset, length=self._length, seed=self._seed + epoch)
        return windows[np.random.default_rng(self._seed + epoch).permutation(len(windows))]


class Trainer:
    """Parameters, optimizer and progress of one training."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        directory = target_directory(arguments.target)
        loaded = load_checkpoint(directory, dtype="float32", progress=False)
        target, self.target = loaded.config, loaded.params
        self.dataset = Dataset.load(arguments.data)
        check_tokenizer(directory, self.dataset.tokenizer)
        mask, end = (token_id(self.dataset.tokenizer, t) for t in (MASK, demo_corpus.END_OF_TEXT))
        sizes = Sizes(**{name: getattr(arguments, name) for name in Sizes.__annotations__})
        self.hf_config = draft_config(target, arguments.target, mask, sizes)
        self.pair = Pair(DSparkConfig.from_hf(self.hf_config), target, end)
        self.pair.draft.check_target(target)
        rollouts = read_rollouts(arguments.rollouts) if arguments.rollouts else None
        self.batches = Batches(self.dataset, rollouts, arguments)
        self.windows = token_windows(self.dataset.heldout, length=arguments.length)
        self.draft = initial_draft(self.pair.draft, arguments.seed)
        self.moments = OPTIMIZER.init(self.draft)
        self.progress = Progress()
        self.checkpoints = None
        if arguments.checkpoint:
            options = ocp.CheckpointManagerOptions(max_to_keep=1)
            self.checkpoints = ocp.CheckpointManager(
                arguments.checkpoint.resolve(), options=options
            )
            self.restore()

    def restore(self) -> None:
        """Continue from the newest Orbax checkpoint, if there is one."""
        assert self.checkpoints is not None
        latest = self.checkpoints.latest_step()
        if latest is None:
            return
        trees = {"draft": self.draft, "moments": self.moments}
        restored = self.checkpoints.restore(
            latest,
            args=ocp.args.Composite(
                trees=ocp.args.StandardRestore(trees), progress=ocp.args.JsonRestore()
            ),
        )
        self.draft, self.moments = restored["trees"]["draft"], restored["trees"]["moments"]
        self.progress = Progress(**restored["progress"])
        print(f"resumed at step {self.progress.step}", flush=True)

    def save(self) -> None:
        """Write an Orbax checkpoint, if wanted."""
        if self.checkpoints is None or self.progress.step == self.checkpoints.latest_step():
            return
        trees = {"draft": self.draft, "moments": self.moments}
        args = ocp.args.Composite(
            trees=ocp.args.StandardSave(trees), progress=ocp.args.JsonSave(asdict(self.progress))
        )
        self.checkpoints.save(self.progress.step, args=args)
        self.checkpoints.wait_until_finished()

    def run(self) -> None:
        """Train until the budget or this call's time is used up, and write what is due."""
        arguments, progress = self.arguments, self.progress
        shape = Shape(arguments.batch, arguments.length, arguments.anchors)
        step_of = compiled_step(self.pair, shape, arguments.ce_weight)
        stop = time.monotonic() + 60.0 * arguments.stop_after
        mark = time.monotonic()
        while progress.share(arguments) < 1.0 and time.monotonic() < stop:
            rate = learning_rate(progress.share(arguments), arguments.peak_rate)
            ids = jnp.asarray(self.batches.at(progress.step))
            self.draft, self.moments, losses = step_of(
                self.draft, self.moments, self.target, ids, self.anchors(ids), jnp.float32(rate)
            )
            progress.step += 1
            # Waiting for the device every few steps is enough to keep the clock honest.
            if progress.step % 10 == 0:
                jax.block_until_ready(losses)
            now = time.monotonic()
            progress.seconds, mark = progress.seconds + now - mark, now
            if progress.step % arguments.report_every == 0:
                self.report({name: float(value) for name, value in losses.items()})
                self.save()
                # What a run that is killed leaves behind.
                self.write()
                mark = time.monotonic()
        if not progress.log or progress.log[-1]["step"] != progress.step:
            self.report({})
        self.save()
        if progress.share(arguments) >= 1.0:
            self.write()

    def anchors(self, ids: jax.Array) -> jax.Array:
        """Return where the blocks of the next batch begin."""
        key = jax.random.fold_in(jax.random.key(self.arguments.seed), self.progress.step)
        return draw_anchors(
            key,
            batch=ids.shape[0],
            length=ids.shape[1] - 1,
            count=self.arguments.anchors,
            block=self.pair.draft.block_size,
        )

    def report(self, losses: dict[str, float]) -> None:
        """Evaluate on held-out text; print and log one record."""
        record = {
            "step": self.progress.step,
            "seconds": round(self.progress.seconds, 1),
            **self.heldout().record(),
            **losses,
        }
        self.progress.log.append(record)
        print(" ".join(f"{name}={value:.4g}" for name, value in record.items()), flush=True)

    def heldout(self) -> Acceptance:
        """Return sums over held-out text, at anchors that are the same every time."""
        batch = min(self.arguments.batch, len(self.windows))
        total = None
        for start in range(0, len(self.windows) - batch + 1, batch):
            ids = jnp.asarray(self.windows[start : start + batch])
            space = np.linspace(0, ids.shape[1] - 1 - self.pair.draft.block_size, HELDOUT_ANCHORS)
            anchors = jnp.broadcast_to(jnp.asarray(space, jnp.int32), (batch, HELDOUT_ANCHORS))
            terms = Acceptance.of(TERMS_OF(self.pair, self.target, self.draft, ids, anchors))
            total = terms if total is None else total.plus(terms)
        assert total is not None
        return total

    def write(self) -> None:
        """Write the drafter's directory, its model card included."""
        arguments = self.arguments
        save_draft(arguments.out, self.hf_config, self.draft, dtype="bfloat16")
        (arguments.out / "training.json").write_text(json.dumps(asdict(self.progress)) + "\n")
        card = CARD.read_text().format(
            name=arguments.out.name,
            target=arguments.target,
            parameters=num_params(dspark_specs(self.pair.draft)),
            config=self.pair.draft,
            data=self.dataset.provenance,
            rollouts=self.rollout_note(),
            training=arguments,
            distance=1.0 - arguments.ce_weight,
            options=self.options(),
            steps=self.progress.step,
            minutes=self.progress.seconds / 60,
            device=jax.devices()[0].device_kind,
            heldout=self.progress.log[-1],
            table=draft_table(self.progress.log[-1], self.pair.draft.block_size),
        )
        (arguments.out / "README.md").write_text(card)

    def options(self) -> str:
        """Return what has to be said on the command line to train the same again."""
        given = vars(self.arguments)
        defaults = vars(parse_arguments(["--target", "", "--out", ""]))
        # Where things lie and how often to report changes nothing.
        skipped = ("target", "out", "data", "checkpoint", "report_every", "stop_after")
        left = [name for name in given if name not in skipped and given[name] != defaults[name]]
        return "".join(f" --{name.replace('_', '-')} {given[name]}" for name in left)

    def rollout_note(self) -> str:
        """Say what part of the batches the target wrote."""
        if not self.arguments.rollouts:
            return "Nothing that the target wrote is among it."
        return (
            f"{self.arguments.share:.0%} of each batch are such texts that the target went on with "
            "(`python -m examples.dspark_rollouts`)."
        )


@dataclass(frozen=True)
class Shape:
    """Texts of a batch, tokens of a text, blocks in a text."""

    batch: int
    length: int
    anchors: int


@functools.cache
def compiled_step(pair: Pair, shape: Shape, ce_weight: float):
    """Return the step (draft, moments, target, ids, anchors, rate) -> (draft, moments, losses).

    It is compiled ahead, so that the budget is spent on steps.

    Donates: draft and moments.
    """

    def step(draft, moments, target, ids, anchors, rate):
        def loss(draft):
            return draft_loss(block_terms(pair, target, draft, ids, anchors), ce_weight)

        gradients, losses = jax.grad(loss, has_aux=True)(draft)
        squares = jax.tree.map(lambda g: jnp.sum(g * g), gradients)
        losses["gradient"] = jnp.sqrt(jax.tree.reduce(jnp.add, squares))
        updates, moments = OPTIMIZER.update(gradients, moments, draft)
        return jax.tree.map(lambda p, u: p - rate * u, draft, updates), moments, losses

    start = time.monotonic()
    draft = abstract_params(dspark_specs(pair.draft), "float32")
    arrays = (
        draft,
        jax.eval_shape(OPTIMIZER.init, draft),
        abstract_params(model_specs(pair.target), "float32"),
        jax.ShapeDtypeStruct((shape.batch, shape.length + 1), jnp.int32),
        jax.ShapeDtypeStruct((shape.batch, shape.anchors), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.float32),
    )
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*arrays).compile()
    print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    return compiled


def learning_rate(share: float, peak: float) -> float:
    """Return a linear warm-up, then the cosine over the budget."""
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, share)))
    return peak * min(1.0, share / WARMUP + 1e-3) * (FLOOR + (1.0 - FLOOR) * cosine)


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token that must be there."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no token {token}")
    return found


def check_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
    """Raise an error if the target reads other tokens than the corpus has."""
    path = directory / "tokenizer.json"
    own = Tokenizer.from_file(str(path))
    if own.to_str() != tokenizer.to_str():
        raise ValueError(f"the corpus was not made with {path}")


def read_rollouts(directory: Path) -> np.ndarray:
    """Return the rows of all files that `examples.dspark_rollouts` wrote to a folder."""
    files = sorted(directory.glob("*.npz"))
    if not files:
        raise ValueError(f"{directory} holds no *.npz file")
    return np.concatenate([np.load(path)["windows"] for path in files])


def draft_table(record: dict[str, float], block_size: int) -> str:
    """Return the monitors of each draft as lines of a table."""
    numbers = range(1, block_size + 1)
    lines = [f"| {n} | {record[f'kept_{n}']:.3f} | {record[f'agreed_{n}']:.3f} |" for n in numbers]
    return "\n".join(lines)


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", required=True, help="demo, demo-dense, or a directory")
    parser.add_argument("--data", type=Path, default=Path(".carry/demo"), help="prepared corpus")
    parser.add_argument("--rollouts", type=Path, help="folder of rollouts to mix in")
    parser.add_argument("--share", type=float, default=0.25, help="of rollouts in each batch")
    parser.add_argument("--out", type=Path, required=True, help="folder for the result")
    parser.add_argument("--minutes", type=float, default=6.0, help="budget of the whole training")
    parser.add_argument("--steps", type=int, help="budget in steps instead")
    parser.add_argument("--stop-after", type=float, default=math.inf, help="minutes of this call")
    parser.add_argument("--checkpoint", type=Path, help="folder of Orbax checkpoints")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--anchors", type=int, default=64, help="blocks in each text")
    parser.add_argument("--peak-rate", type=float, default=2e-3)
    parser.add_argument("--ce-weight", type=float, default=CE_WEIGHT, help="against the distance")
    parser.add_argument(
        "--report-every",
        type=int,
        default=1000,
        help="steps between evaluations, which write the drafter so far and cost time of their own",
    )
    parser.add_argument("--seed", type=int, default=0)
    for name, default in vars(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return parser.parse_args(given)


if __name__ == "__main__":
    Trainer(parse_arguments()).run()
