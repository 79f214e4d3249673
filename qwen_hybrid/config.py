"""Architecture of a hybrid model: one frozen record, read from a Hugging Face ``config.json``."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qwen_hybrid import config_hf
from qwen_hybrid.layer_config import AttentionConfig as AttentionConfig
from qwen_hybrid.layer_config import GdnConfig as GdnConfig
from qwen_hybrid.layer_config import HyperConnectionConfig as HyperConnectionConfig
from qwen_hybrid.layer_config import LayerKind as LayerKind
from qwen_hybrid.layer_config import MoeConfig as MoeConfig
from qwen_hybrid.layer_config import NgramTable as NgramTable
from qwen_hybrid.layer_config import PleConfig as PleConfig
from qwen_hybrid.layer_config import QsaConfig as QsaConfig
from qwen_hybrid.layer_config import check, check_positive
from qwen_hybrid.quantization import QuantizationRecord as QuantizationRecord


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """Architecture of a text model.

    Attributes:
        family: ``"qwen3_5"``, ``"qwen3_5_moe"`` or ``"qwen4_exp"``.
        vocab_size: rows of the embedding; ids above the tokenizer's are padding.
        hidden_size: width of the residual stream.
        layer_kinds: token mixer of every layer.
        intermediate_size: width of the dense MLP, 0 in a mixture of experts.
        rms_norm_eps: epsilon of every RMS norm.
        tie_word_embeddings: whether the head is the embedding.
        max_position_embeddings: longest sequence.
        eos_token_ids: end-of-text ids of the config; () if it names none.
        dtype: dtype of the checkpoint's weights.
        gdn: Gated DeltaNet layers.
        attention: attention layers, dense or sparse.
        moe: experts; None in the dense family.
        hyper_connection: residual streams; ``qwen4_exp`` only.
        qsa: indexer of sparse attention; ``qwen4_exp`` only.
        ple: n-gram embedding; None where no layer has one.
        num_mtp_layers: layers of the MTP head, 0 or 1.
        quantization: what the config says about quantised weights, or None.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layer_kinds: tuple[LayerKind, ...]
    intermediate_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    gdn: GdnConfig
    attention: AttentionConfig
    moe: MoeConfig | None = None
    hyper_connection: HyperConnectionConfig | None = None
    qsa: QsaConfig | None = None
    ple: PleConfig | None = None
    num_mtp_layers: int = 0
    quantization: QuantizationRecord | None = None

    def __post_init__(self) -> None:
        families = config_hf.FAMILIES
        check(self.family in families, f"family must be one of {families}", family=self.family)
        check_positive(self, "vocab_size", "hidden_size", "max_position_embeddings")
        check(self.num_layers > 0, "num_hidden_layers must be >= 1", layers=self.num_layers)
        check(self.rms_norm_eps > 0, "rms_norm_eps must be positive", eps=self.rms_norm_eps)
        check(
            (self.moe is None) == (self.family == "qwen3_5") == (self.intermediate_size > 0),
            "a model has intermediate_size (qwen3_5) or experts (the other families)",
            family=self.family,
            intermediate_size=self.intermediate_size,
            moe=self.moe,
        )
        check(
            self.num_mtp_layers in (0, 1), "num_mtp_layers must be 0 or 1", got=self.num_mtp_layers
        )
        if self.family == "qwen4_exp":
            self._check_qwen4_exp()
        else:
            extras = {"hyper_connection": self.hyper_connection, "qsa": self.qsa, "ple": self.ple}
            present = {name: part for name, part in extras.items() if part is not None}
            check(not present, f"{self.family} has none of {', '.join(extras)}", **present)
            check(
                LayerKind.QSA not in self.layer_kinds,
                f"{self.family} has no indexed_attention layers",
                layer_kinds=self.layer_kinds,
            )

    def _check_qwen4_exp(self) -> None:
        check(self.hyper_connection is not None, "qwen4_exp needs hc_count", hyper_connection=None)
        check(
            LayerKind.ATTENTION not in self.layer_kinds,
            "the attention layers of qwen4_exp are indexed_attention",
            layer_kinds=self.layer_kinds,
        )
        if self.qsa is None:
            check(
                LayerKind.QSA not in self.layer_kinds and self.num_mtp_layers == 0,
                f"attention and MTP layers of qwen4_exp need {', '.join(config_hf.QSA_KEYS)}",
                qsa=None,
            )
        else:
            check(
                self.attention.rotary_dim <= self.qsa.head_dim,
                "int(head_dim * partial_rotary_factor) must be at most indexer_head_dim",
                rotary_dim=self.attention.rotary_dim,
                indexer_head_dim=self.qsa.head_dim,
            )
        for index in self.ple.layers if self.ple is not None else ():
            check(
                index < self.num_layers and self.layer_kinds[index] is LayerKind.GDN,
                "every one-based id of ple_layer_ids must be a linear_attention layer",
                ple_layer_id=index + 1,
                num_hidden_layers=self.num_layers,
            )

    @property
    def num_layers(self) -> int:
        """Decoder layers, the MTP layer not counted."""
        return len(self.layer_kinds)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "HybridConfig":
        """Return the architecture that a parsed ``config.json`` describes.

        Args:
            config: text-only config, or a vision-language one, of which the text part is read.
                Keys that start with an underscore are annotations and ignored.

        Raises:
            ValueError: unknown model type, missing or contradictory key, or a value that the
                families do not allow; the message names the key, the value and the rule.
        """
        hf = config_hf.HfConfig.parse(config)
        config_hf.check_fixed_values(hf)
        quantization = hf.agreed("quantization_config", None)
        return cls(
            family=hf.family,
            vocab_size=hf.count("vocab_size"),
            hidden_size=hf.count("hidden_size"),
            layer_kinds=config_hf.layer_kinds(hf),
            intermediate_size=hf.count("intermediate_size") if hf.family == "qwen3_5" else 0,
            rms_norm_eps=hf.number("rms_norm_eps", 1e-6),
            tie_word_embeddings=config_hf.as_flag(
                "tie_word_embeddings", hf.agreed("tie_word_embeddings", False)
            ),
            max_position_embeddings=hf.count("max_position_embeddings", 32768),
            eos_token_ids=config_hf.eos_token_ids(hf),
            dtype=config_hf.dtype_name(hf),
            gdn=config_hf.gdn_config(hf),
            attention=config_hf.attention_config(hf),
            moe=config_hf.moe_config(hf),
            hyper_connection=config_hf.hyper_connection_config(hf),
            qsa=config_hf.qsa_config(hf),
            ple=config_hf.ple_config(hf),
            num_mtp_layers=config_hf.num_mtp_layers(hf),
            quantization=QuantizationRecord.from_hf(quantization) if quantization else None,
        )

    @classmethod
    def from_directory(cls, directory: str | Path) -> "HybridConfig":
        """Return the architecture of a checkpoint directory, from its ``config.json``.

        Raises:
            FileNotFoundError: no ``config.json``.
            ValueError: not JSON, or as ``from_hf``; the message names the file.
        """
        path = Path(directory) / "config.json"
        try:
            return cls.from_hf(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
