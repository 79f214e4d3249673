"""Losses of the demo models: next token, router balance, indexer, multi-token prediction."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qwen_hybrid.block import BlockTrace
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.model import HybridModel, SequenceOutput
from qwen_hybrid.qsa import QsaTrace

Params = Mapping[str, Any]

BALANCE_WEIGHT = 0.01
INDEXER_WEIGHT = 0.5
# Share of each self-fed step in the loss of the MTP head; the first draft matters most.
MTP_STEP_WEIGHTS = (0.7, 0.2, 0.1)


@dataclass(frozen=True)
class Phase:
    """What a part of the training does.

    Attributes:
      dense_attention: Sparse layers read every token, while the indexer learns which to keep.
      trains_mtp: The MTP head learns too.
      shapes_trunk: What the MTP head needs to know is written into the trunk's hidden rows: its
        loss reaches the trunk through them.
    """

    dense_attention: bool
    trains_mtp: bool
    shapes_trunk: bool


# The indexer and the trunk first; then the trunk under the indexer's choice, and the MTP head;
# then both together.
FIRST_PHASE = Phase(dense_attention=True, trains_mtp=False, shapes_trunk=False)
SECOND_PHASE = Phase(dense_attention=False, trains_mtp=True, shapes_trunk=False)
THIRD_PHASE = Phase(dense_attention=False, trains_mtp=True, shapes_trunk=True)


def total_loss(
    config: HybridConfig, phase: Phase, params: Params, ids: Int[Array, "B T1"]
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the weighted sum of all losses, and each of them by name.

    Args:
      config: Architecture, with an MTP layer.
      phase: What is trained.
      params: float32 parameters.
      ids: Tokens; the last column is a target only.
    """
    model = HybridModel(config)
    out = model.apply(
        {"params": params},
        ids[:, :-1],
        dense_attention=phase.dense_attention,
        trace=True,
        method="sequence",
    )
    assert isinstance(out, SequenceOutput)
    terms = {"loss": token_loss(out.logits, ids[:, 1:])}
    total = terms["loss"]
    traces = list(out.traces)
    if phase.trains_mtp:
        terms["mtp"], mtp_traces = mtp_loss(
            config, params, ids, out, shapes_trunk=phase.shapes_trunk
        )
        total = total + terms["mtp"]
        traces += mtp_traces
    routers = [trace.router for trace in traces if trace.router is not None]
    if routers and config.moe is not None:
        terms["balance"] = _mean([balance_loss(r, config.moe.top_k) for r in routers])
        total = total + BALANCE_WEIGHT * terms["balance"]
    indexers = [trace.qsa for trace in traces if trace.qsa is not None]
    if indexers:
        terms["indexer"] = _mean([indexer_loss(trace) for trace in indexers])
        total = total + INDEXER_WEIGHT * len(indexers) * terms["indexer"]
    return total, terms


def _mean(values: list[Array]) -> Array:
    return jnp.mean(jnp.stack(values))


def token_loss(logits: Float[Array, "*T V"], targets: Int[Array, "*T"]) -> Float[Array, ""]:
    """Return the mean cross-entropy in nats."""
    log_probabilities = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.mean(jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1))


def balance_loss(logits: Float[Array, "B T E"], top_k: int) -> Float[Array, ""]:
    """Return E sum_e (share of choices of e) (mean probability of e); 1 when balanced."""
    probabilities = jax.nn.softmax(logits, axis=-1)
    num_experts = logits.shape[-1]
    chosen = jax.nn.one_hot(jax.lax.top_k(logits, top_k)[1], num_experts)
    share = jnp.mean(jnp.sum(chosen, axis=-2), axis=(0, 1)) / top_k
    return num_experts * jnp.sum(share * jnp.mean(probabilities, axis=(0, 1)))


def indexer_loss(trace: QsaTrace) -> Float[Array, ""]:
    """Return KL(attention mass of each complete group, index scores), mean over queries.

    Both are distributions over the groups that the query may choose; the tail, which is always
    read, is left out of the mass. Queries without a complete group do not count.
    """
    complete = trace.complete
    mass = jnp.where(complete, trace.mass, 0.0)
    total = jnp.sum(mass, axis=-1, keepdims=True)
    target = mass / jnp.maximum(total, 1e-9)
    scores = jnp.where(complete, trace.scores, -1e9)
    log_ratio = jnp.log(jnp.maximum(target, 1e-9)) - jax.nn.log_softmax(scores, axis=-1)
    divergence = jnp.sum(jnp.where(target > 0.0, target * log_ratio, 0.0), axis=-1)
    counted = jnp.any(complete, axis=-1)
    return jnp.sum(jnp.where(counted, divergence, 0.0)) / jnp.sum(counted, dtype=jnp.float32)


def mtp_loss(
    config: HybridConfig,
    params: Params,
    ids: Int[Array, "B T1"],
    target: SequenceOutput,
    *,
    shapes_trunk: bool,
) -> tuple[Float[Array, ""], list[BlockTrace]]:
    """Return the distillation loss of self-fed steps of the MTP head, and their traces.

    Step s at row i reads token i + s and the hidden row of step s - 1 (the target's at s = 1) and
    is to agree with the target's row i + s. The head's own parameters get a gradient and, where
    `shapes_trunk`, the hidden rows that it reads; never the labels.
    """
    frozen = {name: jax.lax.stop_gradient(value) for name, value in params.items()}
    frozen["mtp"] = params["mtp"]
    hidden = target.hidden if config.hyper_connection is None else target.residual
    hidden = hidden if shapes_trunk else jax.lax.stop_gradient(hidden)
    labels = jax.lax.stop_gradient(target.logits)
    num_rows = labels.shape[1]
    padded = jnp.pad(ids, ((0, 0), (0, len(MTP_STEP_WEIGHTS))))
    total, traces = jnp.zeros(()), []
    for step, weight in enumerate(MTP_STEP_WEIGHTS, 1):
        next_ids = padded[:, step : step + num_rows]
        logits, hidden, trace = mtp_sequence(config, frozen, next_ids, hidden)
        loss = agreement_loss(logits[:, : num_rows - step], labels[:, step:])
        total = total + weight * loss
        # Router and indexer are trained on true hidden rows alone.
        traces = traces or [trace]
    return total, traces


def mtp_sequence(
    config: HybridConfig,
    params: Params,
    next_ids: Int[Array, "B T"],
    hidden: Float[Array, "B T _"],
) -> tuple[Float[Array, "B T V"], Float[Array, "B T _"], BlockTrace]:
    """Return logits, rows for the next self-fed step, and the trace of the MTP head's layer."""
    out = HybridModel(config).apply({"params": params}, next_ids, hidden, method="mtp_sequence")
    logits, recurrent, trace = cast(tuple[Array, Array, BlockTrace], out)
    return logits, recurrent, trace


def agreement_loss(logits: Float[Array, "*T V"], target: Float[Array, "*T V"]) -> Float[Array, ""]:
    """Return the mean of the cross-entropies to the target's distribution and to its argmax."""
    log_probabilities = jax.nn.log_softmax(logits, axis=-1)
    soft = -jnp.mean(jnp.sum(jax.nn.softmax(target, axis=-1) * log_probabilities, axis=-1))
    return 0.5 * (soft + token_loss(logits, jnp.argmax(target, axis=-1)))


@dataclass(frozen=True)
class Heldout:
    """Sums over held-out rows.

    Attributes:
      loss: Nats.
      num_tokens: Tokens that `loss` adds up.
      agreed: Rows whose first draft is the target's argmax.
      num_drafts: Rows with a first draft and a target row to compare with.
    """

    loss: float = 0.0
    num_tokens: int = 0
    agreed: int = 0
    num_drafts: int = 0

    def plus(self, loss: float, num_tokens: int, agreed: int, num_drafts: int) -> "Heldout":
        """Return the sums with one more batch."""
        return replace(
            self,
            loss=self.loss + loss,
            num_tokens=self.num_tokens + num_tokens,
            agreed=self.agreed + agreed,
            num_drafts=self.num_drafts + num_drafts,
        )


def heldout_sums(
    config: HybridConfig, params: Params, ids: Int[Array, "B T1"]
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Return (summed loss, agreeing first drafts) of a batch, sparse attention on."""
    model = HybridModel(config)
    out = model.apply({"params": params}, ids[:, :-1], method="sequence")
    assert isinstance(out, SequenceOutput)
    hidden = out.hidden if config.hyper_connection is None else out.residual
    logits, _, _ = mtp_sequence(config, params, ids[:, 1:], hidden)
    same = jnp.argmax(logits[:, :-1], axis=-1) == jnp.argmax(out.logits[:, 1:], axis=-1)
    num_tokens = ids.shape[0] * (ids.shape[1] - 1)
    return token_loss(out.logits, ids[:, 1:]) * num_tokens, jnp.sum(same)
