"""What transformers computes for a checkpoint directory: logits, sparse selections, MTP drafts.

Runs on the CPU. A bfloat16 model is loaded with `dtype=`, never cast afterwards: the cast would
round the rotary frequencies too.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen4ExpTextConfig,
)
from transformers.cache_utils import DynamicCache
from transformers.modeling_layers import MtpModel
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen4


@dataclass(frozen=True)
class Run:
    """Results over all rows that were fed, in order.

    Attributes:
        logits: one row for each token.
        hidden: what the head read; after the final norm, or after the output mixer.
        streams: `qwen4_exp` only: the residual streams before the output mixer.
        selections: for each QSA layer index, the tokens that each query may attend to.
    """

    logits: Float[np.ndarray, "T V"]
    hidden: Float[np.ndarray, "T D"]
    streams: Float[np.ndarray, "T nD"] | None
    selections: dict[int, Bool[np.ndarray, "T T"]]


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().numpy()


@contextmanager
def _recorded(
    model: PreTrainedModel,
) -> Iterator[tuple[dict[int, list[np.ndarray]], list[np.ndarray]]]:
    """Collect each indexer's token mask and the input of the output mixer while active."""
    masks: dict[int, list[np.ndarray]] = {}
    streams: list[np.ndarray] = []

    def keep_mask(module: qwen4.Qwen4ExpTextQSAIndexer, _: tuple, output: torch.Tensor) -> None:
        masks.setdefault(module.layer_idx, []).append(output[0, 0].numpy())

    def keep_streams(_: nn.Module, args: tuple) -> None:
        streams.append(_to_numpy(args[0][0]))

    handles = []
    for name, module in model.named_modules():
        if isinstance(module, qwen4.Qwen4ExpTextQSAIndexer):
            handles.append(module.register_forward_hook(keep_mask))
        if name.endswith("model.hyper_connection_mixer"):
            handles.append(module.register_forward_pre_hook(keep_streams))
    try:
        yield masks, streams
    finally:
        for handle in handles:
            handle.remove()


def _square(rows: list[np.ndarray], length: int) -> np.ndarray:
    """Stack mask rows of growing width into one square mask."""
    blocks = [np.pad(block, ((0, 0), (0, length - block.shape[1]))) for block in rows]
    return np.concatenate(blocks)


class TransformersOracle:
    """One model, loaded from a directory as transformers loads it."""

    def __init__(self, directory: Path, dtype: str = "float32") -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            directory, dtype=getattr(torch, dtype)
        ).eval()

    @torch.no_grad()
    def run(self, ids: Int[np.ndarray, " T"], chunks: Sequence[int] | None = None) -> Run:
        """Feed `ids` and return the results of every row.

        Args:
            ids: one sequence.
            chunks: lengths of the pieces, fed one after another through a cache; they must add
                up to the length of `ids`. None: one forward pass without a cache.
        """
        pieces = [len(ids)] if chunks is None else list(chunks)
        if sum(pieces) != len(ids):
            raise ValueError(f"chunks {pieces} must add up to {len(ids)} tokens")
        cache = None if chunks is None else DynamicCache(config=self.model.config)
        base, head = self.model.get_decoder(), self.model.lm_head
        hidden, logits, start = [], [], 0
        with _recorded(self.model) as (masks, streams):
            for length in pieces:
                piece = torch.tensor(ids[start : start + length])[None]
                out = base(input_ids=piece, cache=cache, use_cache=cache is not None)
                hidden.append(_to_numpy(out.last_hidden_state[0]))
                logits.append(_to_numpy(head(out.last_hidden_state)[0]))
                start += length
        return Run(
            logits=np.concatenate(logits),
            hidden=np.concatenate(hidden),
            streams=np.concatenate(streams) if streams else None,
            selections={layer: _square(rows, len(ids)) for layer, rows in masks.items()},
        )

    def decode(self, ids: Int[np.ndarray, " T"], chunks: Sequence[int]) -> Run:
        """Prefill the first tokens in `chunks`, then feed the others one by one."""
        return self.run(ids, [*chunks, *[1] * (len(ids) - sum(chunks))])

    @torch.no_grad()
    def mtp(
        self, next_ids: Int[np.ndarray, " T"], hidden: Float[np.ndarray, "T D"]
    ) -> tuple[Float[np.ndarray, "T V"], Float[np.ndarray, "T D"]]:
        """Run the MTP head of the `qwen3_5` families over the rows of a target.

        Args:
            next_ids: the token after each row.
            hidden: the target's `Run.hidden`, or an earlier result of this head for rows that
                the head feeds itself.

        Returns:
            Logits for the token after `next_ids`, and the hidden rows for the next draft.
        """
        head = MtpModel.from_pretrained(self.model).eval()
        rows = torch.tensor(hidden, dtype=self.model.dtype)[None]
        # transformers counts a draft row by the position of the token that it is fed.
        positions = torch.arange(1, len(next_ids) + 1)[None]
        out = head.forward_layer(0, rows, positions, None, input_ids=torch.tensor(next_ids)[None])
        return _to_numpy(head._project_to_logits(out)[0]), _to_numpy(out[0])


@torch.no_grad()
def composed_qwen4_layer(
    config: PreTrainedConfig,
    weights: dict[str, torch.Tensor],
    streams: Float[np.ndarray, "T nD"],
) -> tuple[Float[np.ndarray, "T D"], Float[np.ndarray, "T nD"]]:
    """Run one `qwen4_exp` layer of transformers and its output mixer on given streams.

    transformers has no MTP head for this family; its body is this layer.

    Args:
        config: the configuration of the target; only its first QSA layer is built.
        weights: parameters named as in a text model of one layer.
        streams: the layer's input.

    Returns:
        What the head reads, and the streams after the layer.
    """
    keys = config.to_dict() | {
        "num_hidden_layers": 1,
        "layer_types": ["indexed_attention"],
        "ple_layer_ids": [],
    }
    model = qwen4.Qwen4ExpTextModel(Qwen4ExpTextConfig(**keys)).eval()
    model.load_state_dict(weights)
    fed = torch.tensor(streams, dtype=torch.float32)[None]
    model.layers[0].register_forward_pre_hook(lambda _, args: (fed, *args[1:]))
    with _recorded(nn.ModuleDict({"model": model})) as (_, recorded):  # type: ignore[arg-type]
        ids = torch.zeros((1, len(streams)), dtype=torch.long)
        out = model(input_ids=ids, use_cache=False)
    return _to_numpy(out.last_hidden_state[0]), recorded[0]
