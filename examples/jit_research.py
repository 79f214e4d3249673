"""Prefill, decode by a sampling rule of your own, and score: one jitted function, no engine."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer

import qwen_hybrid as qh

PROMPTS = ("def quicksort(xs):\n    ", "def binary_search(items, target):\n")


def top_a(logits, key):
    """Draw among the tokens whose probability is at least a share of the best one's, squared."""
    p = jax.nn.softmax(logits)
    kept = p >= 0.5 * p.max(-1, keepdims=True) ** 2
    return jax.random.categorical(key, jnp.where(kept, logits, -jnp.inf))


@functools.partial(jax.jit, static_argnums=(0, 1, 2), compiler_options=qh.COMPILER_OPTIONS)
def research(model, batch, rule, params, prompts, keys):
    """Tokens by the rule, their log-probabilities, and those of whole texts scored afterwards."""
    feed = functools.partial(qh.extend, model, batch, params)
    logits, state = feed(qh.start_state(model.config, batch), prompts)

    def decode(carry, key):
        token = rule(carry[0], key)
        logits, state = feed(carry[1], token[:, None])
        return (logits[:, 0], state), (token, qh.token_log_probabilities(carry[0], token))

    _, (tokens, logprobs) = jax.lax.scan(decode, (logits[:, -1], state), keys)
    texts = jnp.concatenate([prompts, tokens.T], axis=1)
    logits, _ = feed(qh.start_state(model.config, batch), texts)
    return tokens.T, logprobs.T, qh.token_log_probabilities(logits[:, :-1], texts[:, 1:])


if __name__ == "__main__":
    directory = Path(qh.__file__).parent / "demos" / "demo"
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    prompts = jnp.asarray([encoding.ids for encoding in tokenizer.encode_batch(PROMPTS)])
    checkpoint = qh.load_checkpoint(directory, dtype="float32")
    model = qh.HybridModel(checkpoint.config, "float32")
    batch = qh.fixed_batch(batch_size=len(prompts), max_tokens=128)
    inputs = qh.prepare(checkpoint.params), prompts, jax.random.split(jax.random.key(0), 64)
    tokens, logprobs, scores = research(model, batch, top_a, *inputs)
    print(*tokenizer.decode_batch(tokens.tolist()), sep="\n---\n")
    print("scoring gives the same bits:", bool((scores[:, -64:] == logprobs).all()))
