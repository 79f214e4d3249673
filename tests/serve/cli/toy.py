"""An engine whose answers are written down here; it keeps what it was asked."""

import asyncio
import random
from typing import Any

from serve.sampling_params import SamplingParams, as_sampling_params

PIECES = [" return", "", " 🙂", "\n"]
CONTEXT = 200


class ToyTokenizer:
    """A token is a character; a chat is its roles and contents."""

    chat = "a template"

    def encode(self, text: str) -> list[int]:
        """Return the characters' numbers."""
        return [ord(letter) for letter in text]

    def apply_chat_template(self, messages, *, tools=None, add_generation_prompt=True, **variables):
        """Return roles and contents, and what else was given."""
        if messages[-1]["content"] == "refused":
            raise ValueError("the chat template: refused")
        said = "".join(f"{m['role']}:{m['content']};" for m in messages)
        more = f"{tools}" if tools else ""
        return said + more + str(variables or "") + ("assistant:" if add_generation_prompt else "")


def part(count: int, prompt_tokens: int = 3) -> dict[str, Any]:
    """The result after `count` pieces."""
    info = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": count,
        "finish_reason": {"type": "length"} if count == len(PIECES) else None,
        "sampling_seed": 5,
    }
    return {"text": "".join(PIECES[:count]), "output_ids": [0] * count, "meta_info": info}


class ToyEngine:
    """Answers every prompt with `PIECES`, after a random time where that is asynchronous."""

    flags: dict = {}
    calls: list = []
    num_started = num_closed = 0
    num_under_way = most_under_way = 0
    after_pieces: Any = None

    def __init__(self, **flags: Any):
        if flags["model_path"] == "absent":
            raise FileNotFoundError("no model directory 'absent'")
        type(self).flags, type(self).calls = flags, []
        type(self).num_started += 1
        self.tokenizer = None if flags.get("skip_tokenizer_init") else ToyTokenizer()
        self.context_length = CONTEXT

    def __enter__(self):
        return self

    def __exit__(self, *error: object):
        type(self).num_closed += 1

    def generate(self, prompt=None, sampling_params=None, input_ids=None, *, stream=False):
        """Return the whole answer or an iterator over its growing parts."""
        params = self._checked(prompt, input_ids, sampling_params)
        self.calls.append((prompt if input_ids is None else input_ids, params, stream))
        return self._parts() if stream else part(len(PIECES))

    def _parts(self):
        for count in range(1, len(PIECES) + 1):
            yield part(count)
            if self.after_pieces:
                self.after_pieces(count)

    async def async_generate(self, prompt=None, sampling_params=None, input_ids=None, **options):
        """Return the prompt and the pieces, after a while."""
        params = self._checked(prompt, input_ids, sampling_params)
        cls = type(self)
        cls.num_under_way += 1
        cls.most_under_way = max(cls.most_under_way, cls.num_under_way)
        await asyncio.sleep(random.random() / 100)
        cls.num_under_way -= 1
        content = prompt if input_ids is None else input_ids
        self.calls.append((content, params, options))
        answers = [part(len(PIECES)) | {"text": f"{content}"} for _ in range(params.n)]
        return answers if params.n > 1 else answers[0]

    async def async_score(self, input_ids, **options):
        """Return a log-probability of -1 for every token but the first."""
        self._checked(None, input_ids, None)
        self.calls.append((input_ids, options))
        scores = [(None if i == 0 else -1.0, x, chr(x)) for i, x in enumerate(input_ids)]
        info = {"input_token_logprobs": scores}
        if options:
            info["input_top_logprobs"] = [None] * len(scores)
        return {"meta_info": info}

    def _checked(self, prompt: Any, input_ids: Any, params: Any) -> SamplingParams:
        content = prompt if input_ids is None else input_ids
        if not content:
            raise ValueError("a prompt needs at least one token")
        if prompt == "a bug":
            raise ZeroDivisionError
        return as_sampling_params(params)
