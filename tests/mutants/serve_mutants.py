"""Deliberate bugs in who runs, who makes way and what callers are told."""

from typing import Any

from serve import inputs
from serve.request import Request
from serve.scheduler import Scheduler
from tests.mutants.mutant import Mutant, Patch
from tests.mutants.swap import swap

PREEMPTION = "tests/serve/test_preemption.py"
RANDOM = "tests/serve/test_scheduler_random.py"
CALLS = "tests/serve/test_engine_calls.py"
STARVED = "tests/serve/test_engine_preemption.py"


def _the_oldest_makes_way(patch: Patch) -> None:
    def changed(self, request):
        for other in self.running:
            if other is not request and not other.is_protected:
                self.preempt(other)
                return True
        return False

    patch.setattr(Scheduler, "_preempt_younger", changed)


def _nobody_is_protected(patch: Patch) -> None:
    patch.setattr(Request, "is_protected", property(lambda self: False))


def _to_the_end_of_the_queue(patch: Patch) -> None:
    original = Scheduler.preempt

    def changed(self, request):
        original(self, request)
        self.waiting.rotate(-1)

    patch.setattr(Scheduler, "preempt", changed)


def _the_newest_token_is_lost(patch: Patch) -> None:
    original = Scheduler.preempt

    def changed(self, request):
        if len(request.output_ids) > 1:
            request.output_ids.pop()
        original(self, request)

    patch.setattr(Scheduler, "preempt", changed)


def _the_seal_outlives_its_state(patch: Patch) -> None:
    original = Scheduler.preempt

    def changed(self, request):
        sealed_len = request.sealed_len
        original(self, request)
        request.sealed_len = sealed_len

    patch.setattr(Scheduler, "preempt", changed)


def _blocks_beyond_a_promise(patch: Patch) -> None:
    patch.setattr(Scheduler, "_promised_blocks", lambda self: 0)


def _samples_share_a_seed(patch: Patch) -> None:
    def make(original: Any) -> Any:
        return lambda seed, index: original(seed, 0)

    swap(patch, inputs, "fold", make)


SERVE_MUTANTS = (
    Mutant(
        "the oldest makes way",
        "blocks are taken from the request that has waited longest",
        _the_oldest_makes_way,
        (PREEMPTION, RANDOM),
    ),
    Mutant(
        "nobody is protected",
        "a resumed request may be preempted before it made a token",
        _nobody_is_protected,
        (PREEMPTION, RANDOM),
    ),
    Mutant(
        "preempted to the end of the queue",
        "later requests overtake one that made way",
        _to_the_end_of_the_queue,
        (PREEMPTION, RANDOM),
    ),
    Mutant(
        "newest token lost",
        "a preempted request samples its last token again",
        _the_newest_token_is_lost,
        (PREEMPTION, STARVED),
    ),
    Mutant(
        "seal outlives its state",
        "a resumed request believes that its first blocks are sealed",
        _the_seal_outlives_its_state,
        (PREEMPTION, RANDOM),
    ),
    Mutant(
        "blocks beyond a promise",
        "a prompt is admitted on blocks that another prompt is about to take",
        _blocks_beyond_a_promise,
        ("tests/serve/test_scheduler.py",),
    ),
    Mutant(
        "samples share a seed", "all samples of a prompt are one", _samples_share_a_seed, (CALLS,)
    ),
)
