"""Train a demo model on the corpus that `examples.demo_data` made.

    python -m examples.demo_data --out .carry/demo
    python -m examples.train_demo --model demo --minutes 8 --out out/demo

The learning rate follows a cosine over the budget, `--minutes` or `--steps`. A run that is cut
short (`--stop-after`) continues from its Orbax checkpoint, or, on another machine, from the
parameters that it left in `--out`, without the optimizer's moments.
"""

import argparse
import functools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import safetensors.numpy

from examples.demo_data import Dataset, epoch_windows, token_windows
from examples.demo_losses import (
    FIRST_PHASE,
    SECOND_PHASE,
    THIRD_PHASE,
    Heldout,
    Phase,
    heldout_sums,
    total_loss,
)
from examples.demo_models import MODELS
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.params import leaves, set_leaf
from qwen_hybrid.weights import dummy_params, save_hf

WARMUP_STEPS = 100
FLOOR = 0.02
# Shares of the budget after which the second and the third phase begin.
SECOND_PHASE_AT = 0.4
THIRD_PHASE_AT = 0.7
OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "down_proj")
# Matrices whose rows are looked up, not multiplied: no weight decay.
TABLES = ("embed_tokens", "ngram_embedding")
RESUME_FILES = 2


@dataclass
class Progress:
    """How far a training has come; saved with every checkpoint.

    Attributes:
      step: Optimizer steps done.
      seconds: Time spent on them, without compilation and reports.
      log: One record per report.
    """

    step: int = 0
    seconds: float = 0.0
    log: list[dict[str, float]] = field(default_factory=list)

    def share(self, arguments: argparse.Namespace) -> float:
        """Return how much of the budget is used."""
        if arguments.steps:
            return self.step / arguments.steps
        return self.seconds / (60.0 * arguments.minutes)


def initial_params(config: HybridConfig, seed: int) -> dict[str, Any]:
    """Return float32 parameters; projections into the residual are scaled down by depth."""
    scale = (2.0 * config.num_layers) ** -0.5
    params: dict[str, Any] = {}
    for path, value in leaves(dummy_params(config, dtype="float32", seed=seed, progress=False)):
        set_leaf(params, path, value * scale if path[-1] in OUTPUT_PROJECTIONS else value)
    return params


def make_optimizer(params: dict[str, Any]) -> optax.GradientTransformation:
    """Return AdamW without its learning rate, which the step applies."""
    decayed: dict[str, Any] = {}
    for path, value in leaves(params):
        set_leaf(decayed, path, value.ndim > 1 and path[-1] not in TABLES)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.95),
        optax.add_decayed_weights(0.1, mask=decayed),
    )


def make_step(config: HybridConfig, phase: Phase, optimizer: optax.GradientTransformation):
    """Return the jitted step (params, moments, ids, rate) -> (params, moments, losses).

    Donates: params and moments.
    """

    def step(params, moments, ids, rate):
        loss = functools.partial(total_loss, config, phase)
        gradients, terms = jax.grad(loss, has_aux=True)(params, ids)
        terms["gradient"] = optax.global_norm(gradients)
        updates, moments = optimizer.update(gradients, moments, params)
        params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
        return params, moments, terms

    return jax.jit(step, donate_argnums=(0, 1))


def learning_rate(share: float, peak: float, steps_since_start: int) -> float:
    """Return the cosine over the budget; each start warms up, since moments may be fresh."""
    warmup = min(1.0, (steps_since_start + 1) / WARMUP_STEPS)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, share)))
    return peak * warmup * (FLOOR + (1.0 - FLOOR) * cosine)


def batches(dataset: Dataset, *, batch: int, length: int, seed: int) -> Iterator[np.ndarray]:
    """Yield batches of length + 1 tokens for ever, each epoch in a new order."""
    epoch = 0
    while True:
        windows = epoch_windows(dataset, length=length, seed=seed + epoch)
        order = np.random.default_rng(seed + epoch).permutation(len(windows))
        for start in range(0, len(order) - batch + 1, batch):
            yield windows[order[start : start + batch]]
        epoch += 1


def evaluate(sums_of, params: dict[str, Any], windows: np.ndarray, batch: int) -> Heldout:
    """Return held-out sums over all full batches."""
    sums = Heldout()
    for start in range(0, len(windows) - batch + 1, batch):
        ids = windows[start : start + batch]
        loss, agreed = sums_of(params, jnp.asarray(ids))
        rows = ids.shape[1] - 1
        sums = sums.plus(float(loss), batch * rows, int(agreed), batch * (rows - 1))
    return sums


class Trainer:
    """Parameters, optimizer and progress of one training."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.hf_config = MODELS[arguments.model]
        self.config = HybridConfig.from_hf(self.hf_config)
        self.dataset = Dataset.load(arguments.data)
        self.progress = Progress()
        self.params = initial_params(self.config, arguments.seed)
        self.checkpoints = None
        if arguments.resume:
            self.read_resume(arguments.resume)
        self.optimizer = make_optimizer(self.params)
        self.moments = self.optimizer.init(self.params)
        if arguments.checkpoint:
            options = ocp.CheckpointManagerOptions(max_to_keep=1)
            path = arguments.checkpoint.resolve()
            self.checkpoints = ocp.CheckpointManager(path, options=options)
            self.restore()
        self.sums_of = jax.jit(functools.partial(heldout_sums, self.config))
        self.windows = token_windows(self.dataset.heldout, length=arguments.length)

    def restore(self) -> None:
        """Continue from the newest Orbax checkpoint, if there is one."""
        assert self.checkpoints is not None
        latest = self.checkpoints.latest_step()
        if latest is None:
            return
        trees = {"params": self.params, "moments": self.moments}
        restored = self.checkpoints.restore(
            latest,
            args=ocp.args.Composite(
                trees=ocp.args.StandardRestore(trees), progress=ocp.args.JsonRestore()
            ),
        )
        self.params, self.moments = restored["trees"]["params"], restored["trees"]["moments"]
        self.progress = Progress(**restored["progress"])
        print(f"resumed at step {self.progress.step}", flush=True)

    def save(self) -> None:
        """Write what a cut run continues from: resume files, and an Orbax checkpoint if wanted."""
        self.write_resume(self.arguments.out)
        if self.checkpoints is not None and self.progress.step != self.checkpoints.latest_step():
            trees = {"params": self.params, "moments": self.moments}
            args = ocp.args.Composite(
                trees=ocp.args.StandardSave(trees),
                progress=ocp.args.JsonSave(asdict(self.progress)),
            )
            self.checkpoints.save(self.progress.step, args=args)
            self.checkpoints.wait_until_finished()

    def read_resume(self, directory: Path) -> None:
        """Take parameters and progress that `write_resume` left."""
        self.progress = Progress(**json.loads((directory / "training.json").read_text()))
        tensors: dict[str, np.ndarray] = {}
        for path in sorted(directory.glob("params-*.safetensors")):
            tensors |= safetensors.numpy.load_file(path)
        for path, _ in list(leaves(self.params)):
            set_leaf(self.params, path, jnp.asarray(tensors["/".join(path)]))

    def write_resume(self, directory: Path) -> None:
        """Write float32 parameters, in files small enough to copy around, and the progress."""
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {"/".join(path): np.asarray(value) for path, value in leaves(self.params)}
        names = sorted(tensors, key=lambda name: tensors[name].nbytes)
        for part in range(RESUME_FILES):
            chosen = {name: tensors[name] for name in names[part::RESUME_FILES]}
            safetensors.numpy.save_file(chosen, directory / f"params-{part}.safetensors")
        (directory / "training.json").write_text(json.dumps(asdict(self.progress)) + "\n")

    def run(self) -> None:
        """Train until the budget or this call's time is used up, and write what is due."""
        arguments = self.arguments
        stop = time.monotonic() + 60.0 * arguments.stop_after
        self.train(FIRST_PHASE, until=SECOND_PHASE_AT, stop=stop)
        self.train(SECOND_PHASE, until=THIRD_PHASE_AT, stop=stop)
        self.train(THIRD_PHASE, until=1.0, stop=stop)
        if not self.progress.log or self.progress.log[-1]["step"] != self.progress.step:
            self.report({}, 0.0)
        self.save()
        if self.progress.share(arguments) >= 1.0:
            # This also removes the resume files.
            save_hf(arguments.out, self.hf_config, self.params, dtype="bfloat16")

    def train(self, phase: Phase, *, until: float, stop: float) -> None:
        """Take steps of one phase until that share of the budget, or until the time to stop."""
        arguments, progress = self.arguments, self.progress
        if progress.share(arguments) >= until:
            return
        step_of = self.compiled_step(phase)
        source = batches(
            self.dataset,
            batch=arguments.batch,
            length=arguments.length,
            seed=arguments.seed + 1000 * progress.step,
        )
        mark, first_step = time.monotonic(), progress.step
        while progress.share(arguments) < until and time.monotonic() < stop:
            share = progress.share(arguments)
            rate = learning_rate(share, arguments.peak_rate, progress.step - first_step)
            ids = jnp.asarray(next(source))
            self.params, self.moments, terms = step_of(
                self.params, self.moments, ids, jnp.float32(rate)
            )
            progress.step += 1
            # Waiting for the device every few steps is enough to keep the clock honest.
            if progress.step % 10 == 0:
                jax.block_until_ready(terms)
            now = time.monotonic()
            progress.seconds, mark = progress.seconds + now - mark, now
            if progress.step % arguments.report_every == 0:
                self.report({name: float(value) for name, value in terms.items()}, rate)
                self.save()
                mark = time.monotonic()

    def compiled_step(self, phase: Phase):
        """Compile a phase's step ahead, so that the budget is spent on steps."""
        start = time.monotonic()
        ids = jax.ShapeDtypeStruct((self.arguments.batch, self.arguments.length + 1), jnp.int32)
        rate = jax.ShapeDtypeStruct((), jnp.float32)
        step = make_step(self.config, phase, self.optimizer)
        compiled = step.lower(self.params, self.moments, ids, rate).compile()
        print(f"compiled in {time.monotonic() - start:.0f} s: {phase}", flush=True)
        return compiled

    def report(self, terms: dict[str, float], rate: float) -> None:
        """Evaluate on held-out text; print and log one record."""
        batch = min(self.arguments.batch, len(self.windows))
        sums = evaluate(self.sums_of, self.params, self.windows, batch)
        record = {
            "step": self.progress.step,
            "seconds": round(self.progress.seconds, 1),
            "rate": rate,
            "heldout": sums.loss / sums.num_tokens,
            "agreement": sums.agreed / sums.num_drafts,
            **terms,
        }
        self.progress.log.append(record)
        print(" ".join(f"{name}={value:.4g}" for name, value in record.items()), flush=True)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--data", type=Path, default=Path(".carry/demo"), help="prepared corpus")
    parser.add_argument("--out", type=Path, required=True, help="folder for the result")
    parser.add_argument("--minutes", type=float, default=8.0, help="budget of the whole training")
    parser.add_argument("--steps", type=int, help="budget in steps instead")
    parser.add_argument("--stop-after", type=float, default=math.inf, help="minutes of this call")
    parser.add_argument("--checkpoint", type=Path, help="folder of Orbax checkpoints")
    parser.add_argument("--resume", type=Path, help="--out of a run that was cut short")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--peak-rate", type=float, default=2.5e-3)
    parser.add_argument("--report-every", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    Trainer(parse_arguments()).run()
