"""A scheduler without a device: small capacities, requests, and steps that compute nothing."""

from serve.request import Request, StepResult
from serve.sampling_params import SamplingParams
from serve.scheduler import Capacities, Scheduler, Work

BLOCK = 64
LOG_ROWS = 80
SMALL = Capacities(
    num_slots=3,
    num_blocks=8,
    num_state_slots=5,
    block_size=BLOCK,
    log_rows=LOG_ROWS,
    max_rows=144,
    prefill_rows=128,
)


def request(name: str, prompt_len: int, max_new_tokens: int = 4) -> Request:
    """A request whose tokens tell whose they are."""
    return Request(
        rid=name,
        prompt_ids=[1000 * ord(name[0]) + i for i in range(prompt_len)],
        params=SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True),
        seed=0,
        eos_ids=frozenset(),
    )


def take(one: Request, token: int) -> None:
    """Hand a request a token."""
    one.take(StepResult(one, tokens=[token]))


def stored_boundary(item: Work) -> int:
    """The boundary of the sealed state after a step without drafts, as the device has it."""
    one = item.request
    last = (one.committed_len + len(item.ids) - 1) // BLOCK * BLOCK
    return max(last, one.sealed_len) if one.next_slot > 0 else one.sealed_len


def run(scheduler: Scheduler, work: list[Work]) -> None:
    """Do what the engine does after a step, each new token being the number of tokens so far."""
    for item in work:
        one = item.request
        scheduler.commit(item, len(item.ids), stored_boundary(item))
        if item.is_last:
            take(one, one.prompt_len + len(one.output_ids))
        if one.is_finished:
            scheduler.release(one)


def rows(work: list[Work]) -> dict[str, int]:
    """Rows of each request in a step."""
    return {item.request.rid: len(item.ids) for item in work}
