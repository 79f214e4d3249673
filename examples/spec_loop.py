"""Speculative decoding by hand: draft, verify, commit over one state, without the engine."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer

import qwen_hybrid as qh
import spec

PROMPT, NUM_TOKENS, NUM_DRAFTS = "class Stack:\n    def push(self, item):\n", 96, 3


@functools.partial(jax.jit, static_argnums=(0, 1, 2), compiler_options=qh.COMPILER_OPTIONS)
def one_round(model, batch, drafter, params, state, ids):
    """Draft after the newest tokens, let the target judge, make final what it agrees with."""
    target, sampling = spec.Target(model.bind({"params": params}), batch, {}), spec.parameters(1)
    call, reads = spec.round_call(batch, ids, jnp.array([ids.shape[1]]), NUM_DRAFTS)
    drafts, state = drafter.propose(target, spec.ready(state), call, sampling)
    layout = spec.with_drafts(call, reads, drafts)
    verified = spec.verify(target, state, layout, sampling)
    accepted = spec.accept(call, drafts, layout.window, verified.tokens, state.history)
    state = spec.committed(state, verified, accepted, sampling)
    seen = spec.observed(call, layout, verified, accepted)
    return accepted, drafter.observe(target, state, seen, sampling)


if __name__ == "__main__":
    directory = Path(qh.__file__).parent / "demos" / "demo"
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    checkpoint = qh.load_checkpoint(directory, dtype="float32")
    model, params = qh.HybridModel(checkpoint.config, "float32"), qh.prepare(checkpoint.params)
    drafter = spec.MtpDrafter(num_drafts=NUM_DRAFTS, config=checkpoint.config)
    batch = qh.fixed_batch(batch_size=1, max_tokens=256, max_window=NUM_DRAFTS + 1, with_mtp=True)
    state = spec.start(checkpoint.config, batch, drafter)
    ids, text, counts = tokenizer.encode(PROMPT).ids, [], []
    while len(text) < NUM_TOKENS:
        accepted, state = one_round(model, batch, drafter, params, state, jnp.array([ids]))
        counts.append(int(accepted.num_accepted[0]))
        text += accepted.tokens[0, : counts[-1] + 1].tolist()
        ids = text[-1:]
    print(PROMPT + tokenizer.decode(text), f"accepted by round: {counts}", sep="\n---\n")
