"""Chains of drafts from the MTP heads of both families, beside float64 and plain decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qwen_hybrid as qh
import spec
from tests.oracles.numpy_model import NumpyModel
from tests.oracles.recipe import Checkpoints, config_dict, sample_tokens

NAMES = ("q35_dense_mtp", "q4_qsa")
NUM_DRAFTS = 3
NUM_TOKENS = 100


class Loop:
    """A fixed batch of two sequences of one model, and the same without drafts."""

    def __init__(self, name: str, directory):
        checkpoint = qh.load_checkpoint(directory, dtype="float32", progress=False)
        self.config, self.oracle = checkpoint.config, NumpyModel(directory)
        self.params = qh.prepare(checkpoint.params)
        self.model = qh.HybridModel(self.config, "float32")
        self.ids = sample_tokens(config_dict(name), NUM_TOKENS)
        self.drafters = {
            True: spec.MtpDrafter(num_drafts=NUM_DRAFTS, config=self.config),
            False: spec.NO_DRAFTS,
        }

    def batch(self, drafts: bool) -> qh.StateConfig:
        window = NUM_DRAFTS + 1 if drafts else 1
        return qh.fixed_batch(batch_size=2, max_tokens=192, max_window=window, with_mtp=drafts)

    @functools.cached_property
    def step(self):
        """One jitted round; `drafts` chooses the drafter."""

        @functools.partial(jax.jit, static_argnums=0, compiler_options=qh.COMPILER_OPTIONS)
        def run(drafts, params, state, ids, count, sampling):
            batch, drafter = self.batch(drafts), self.drafters[drafts]
            target = spec.Target(self.model.bind({"params": params}), batch, {})
            call, reads = spec.round_call(batch, ids, count, drafter.num_drafts)
            return spec.step(target, drafter, spec.ready(state), call, reads, sampling)

        return run

    def run(self, *, drafts: bool, temperature: float, count: int):
        """Tokens of both sequences, and the outputs of all rounds."""
        sampling = spec.parameters(2, temperature=temperature, seed=5)
        state = spec.start(self.config, self.batch(drafts), self.drafters[drafts])
        ids = jnp.asarray(np.stack([self.ids, self.ids[::-1]]), jnp.int32)
        lengths = jnp.asarray([NUM_TOKENS, NUM_TOKENS - 37])
        tokens, outputs = [[], []], []
        while min(map(len, tokens)) < count:
            output, state = self.step(drafts, self.params, state, ids, lengths, sampling)
            outputs.append(jax.device_get(output))
            accepted = outputs[-1].accepted
            for slot in range(2):
                number = int(accepted.num_accepted[slot]) + 1
                tokens[slot] += accepted.tokens[slot, :number].tolist()
            # Padded, so that every round is the same program.
            ids = jnp.asarray([[t[-1]] * NUM_TOKENS for t in tokens], jnp.int32)
            lengths = jnp.ones(2, jnp.int32)
        return tokens, outputs


@pytest.fixture(scope="module", params=NAMES)
def loop(request, checkpoints: Checkpoints) -> Loop:
    return Loop(request.param, checkpoints.directory(request.param, mtp=True))


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_chain_is_that_of_the_float64_head(loop: Loop, number):
    """After the prompt, and after rounds whose drafts were rejected."""
    tokens, outputs = loop.run(drafts=True, temperature=0.0, count=6)
    drafts = outputs[number].proposal.tokens
    num_checked = 0
    for slot, ids in enumerate((loop.ids, loop.ids[::-1][: NUM_TOKENS - 37])):
        emitted = sum(int(out.accepted.num_accepted[slot]) + 1 for out in outputs[:number])
        known = np.append(ids, tokens[slot][: emitted - 1]).astype(ids.dtype)
        target = loop.oracle.run(known)
        assert target.logits[-1].argmax() == tokens[slot][emitted - 1]
        next_ids = np.append(known[1:], tokens[slot][emitted - 1])
        chain = loop.oracle.mtp_drafts(next_ids, target.carried, count=NUM_DRAFTS)
        for at, row in enumerate(out.logits[-1] for out in chain):
            if np.diff(np.sort(row)[-2:])[0] < 1e-3:
                # This draft, and with it the rest, is a matter of luck.
                break
            assert drafts[slot, at] == row.argmax()
            num_checked += 1
    assert num_checked >= NUM_DRAFTS


# The other family: the laws on demo-dense.
@pytest.mark.parametrize("loop", ["q4_qsa"], indirect=True)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_those_of_plain_decoding(loop: Loop, temperature):
    plain, _ = loop.run(drafts=False, temperature=temperature, count=40)
    tokens, outputs = loop.run(drafts=True, temperature=temperature, count=40)
    assert [a[:40] for a in tokens] == [a[:40] for a in plain]
    accepted = sum(int(output.accepted.num_accepted.sum()) for output in outputs)
    # Heads with random weights agree with their target where the noise decides for both.
    assert (accepted > 0) == (temperature > 0)
    assert accepted < 2 * (len(outputs) - 1) * NUM_DRAFTS


def test_settings_are_checked(loop: Loop):
    with pytest.raises(ValueError, match="1 to 7 tokens, got 8"):
        spec.MtpDrafter(num_drafts=8, config=loop.config)
