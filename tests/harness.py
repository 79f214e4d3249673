"""Drive the paged model by hand: rows in, logits out, one sequence."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from qwen_hybrid.config import HybridConfig
from qwen_hybrid.model import HybridModel
from qwen_hybrid.state import (
    EMPTY_STATE_SLOT,
    Call,
    Sequences,
    StateConfig,
    commit,
    init_state,
)
from qwen_hybrid.step import COMPILER_OPTIONS, logits
from qwen_hybrid.weights import load_checkpoint

MAX_ROWS = 256
SLOT = 1


class PagedModel:
    """One sequence in slot 1 of 2, blocks in a permuted table."""

    def __init__(self, directory: str | Path, dtype: str, *, max_tokens: int = 512):
        checkpoint = load_checkpoint(directory, dtype=dtype, progress=False)
        self.config = checkpoint.config
        self._params = checkpoint.params
        blocks = -(-max_tokens // 64)
        self.state_config = StateConfig(
            num_slots=2,
            num_blocks=blocks + 3,
            num_state_slots=4,
            blocks_per_slot=blocks,
            dtype=dtype,
        )
        model = HybridModel(self.config, dtype)
        self._logits = jax.jit(
            functools.partial(logits, model, self.state_config),
            donate_argnums=1,
            compiler_options=COMPILER_OPTIONS,
        )
        self._commit = jax.jit(commit, donate_argnums=0)
        self.reset()

    def reset(self) -> None:
        """Start an empty sequence over what the last one left behind."""
        sc = self.state_config
        self.state = init_state(self.config, sc)
        table = np.zeros((sc.num_slots, sc.blocks_per_slot), np.int32)
        table[SLOT] = np.random.default_rng(3).permutation(sc.num_blocks)[: sc.blocks_per_slot]
        zeros = jnp.zeros(sc.num_slots, jnp.int32)
        self.state = dataclasses.replace(
            self.state,
            sequences=Sequences(
                zeros, zeros + 0, zeros + EMPTY_STATE_SLOT, zeros - 1, jnp.asarray(table)
            ),
        )

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Feed some tokens; logits of each."""
        sequences = self.state.sequences
        used = int(sequences.sealed_slot[SLOT])
        spare = jnp.full(self.state_config.num_slots, -1, jnp.int32).at[SLOT].set(used % 3 + 1)
        self.state = dataclasses.replace(
            self.state, sequences=dataclasses.replace(sequences, next_slot=spare)
        )
        packed = np.zeros(MAX_ROWS, np.int32)
        packed[: len(ids)] = ids
        count = jnp.zeros(self.state_config.num_slots, jnp.int32).at[SLOT].set(len(ids))
        call = Call(jnp.asarray(packed), count, count, jnp.zeros(count.shape, bool))
        out, self.state = self._logits(self._params, self.state, call)
        self.state = self._commit(self.state, count)
        return np.asarray(out[: len(ids)])

    def prefill(self, ids: np.ndarray, chunks: list[int] | None = None) -> np.ndarray:
        """Logits of a whole prompt, fed in chunks."""
        self.reset()
        out, at = [], 0
        for size in chunks or [len(ids)]:
            out.append(self.rows(ids[at : at + size]))
            at += size
        assert at == len(ids), "chunks must cover the prompt"
        return np.concatenate(out)

    def decode(self, next_ids: np.ndarray) -> np.ndarray:
        """Logits of single-token steps after what was fed before."""
        return np.concatenate([self.rows(np.asarray([i])) for i in next_ids])


def reference_logits(directory: str | Path, dtype: str, ids: np.ndarray) -> np.ndarray:
    """Logits of whole sequences through the differentiable reference."""
    checkpoint = load_checkpoint(directory, dtype=dtype, progress=False)
    model = HybridModel(checkpoint.config, dtype)
    run = jax.jit(
        functools.partial(model.apply, method="sequence"), compiler_options=COMPILER_OPTIONS
    )
    return np.asarray(run({"params": checkpoint.params}, jnp.asarray(ids, jnp.int32)).logits)


def config_of(directory: str | Path) -> HybridConfig:
    """The architecture of a model directory."""
    return HybridConfig.from_directory(directory)
