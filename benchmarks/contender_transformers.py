"""transformers as a contender."""

import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.contenders import NUM_STEPS, PROMPT_LEN, prompts_of


class Transformers:
    """transformers with torch on the CPU, its cache on."""

    def __init__(self, directory: Path, dtype: str):
        self._model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=getattr(torch, dtype)
        ).eval()

    def _start(self, prompts: list[list[int]]) -> Any:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            return self._model(ids, use_cache=True, logits_to_keep=1)

    def prefill(self, num_tokens: int) -> float:
        """Seconds from a prompt to its first new token."""
        start = time.perf_counter()
        self._start(prompts_of(1, num_tokens)).logits.argmax(-1).tolist()
        return time.perf_counter() - start

    def decode(self, batch: int) -> float:
        """Seconds of one step after the prompts are in the cache."""
        out = self._start(prompts_of(batch, PROMPT_LEN))
        cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
        start = time.perf_counter()
        with torch.inference_mode():
            for _ in range(NUM_STEPS):
                out = self._model(token, past_key_values=cache, use_cache=True)
                token = out.logits[:, -1:].argmax(-1)
                token.tolist()
        return (time.perf_counter() - start) / NUM_STEPS
