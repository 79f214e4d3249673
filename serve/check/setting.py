"""What is checked: a model, its types, the shape of the engine."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

from qwen_hybrid.config import HybridConfig
from serve.check.device import fill_with_nan
from serve.check.sizes import Sizes
from serve.check.speculation import Drafting
from serve.engine import Engine


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What the engines of a check run; plain data, so that another process can be given it.

    Attributes:
      directory: of the model.
      load_format: `auto` reads the weights, `dummy` makes random ones.
      dtype: of the activations; `auto` is the checkpoint's.
      state_dtype: of the sealed states.
      block_size: tokens of a block.
      max_running_requests: sequences that a schedule runs side by side.
      chunked_prefill_size: prompt tokens of one of its steps at most.
      compilation_cache_dir: as `Engine` takes it.
    """

    directory: str
    load_format: str = "auto"
    dtype: str = "auto"
    state_dtype: str = "float32"
    block_size: int = 64
    max_running_requests: int = 4
    chunked_prefill_size: int = 128
    compilation_cache_dir: str | None = "auto"

    def __post_init__(self) -> None:
        if self.max_running_requests < 2:
            raise ValueError(
                "max_running_requests must be at least 2, a request and one beside it, got "
                f"{self.max_running_requests}"
            )

    @functools.cached_property
    def config(self) -> HybridConfig:
        """The model's architecture."""
        return HybridConfig.from_directory(Path(self.directory))

    @functools.cached_property
    def sizes(self) -> Sizes:
        """Lengths of prompts, outputs and chunks."""
        return Sizes.of(self.block_size, self.config.max_position_embeddings)

    def golden_engine(self) -> Engine:
        """An engine for one request at a time, with room for every prompt in one piece."""
        size = self.sizes.longest_prompt
        return self._engine(max_running_requests=1, chunked_prefill_size=size)

    def schedule_engine(self, drafting: Drafting | None) -> Engine:
        """An engine for several requests, which drafts as `drafting` says."""
        more = {} if drafting is None else drafting.arguments()
        return self._engine(
            max_running_requests=self.max_running_requests,
            chunked_prefill_size=self.chunked_prefill_size,
            **more,
        )

    def _engine(self, **arguments: Any) -> Engine:
        """An engine without a tokenizer, its memory filled with NaN."""
        engine = Engine(
            self.directory,
            load_format=self.load_format,
            dtype=self.dtype,
            state_dtype=self.state_dtype,
            block_size=self.block_size,
            context_length=self.sizes.context_len,
            compilation_cache_dir=self.compilation_cache_dir,
            skip_tokenizer_init=True,
            **arguments,
        )
        engine.loop.call(lambda: fill_with_nan(engine.core.runner))
        return engine
