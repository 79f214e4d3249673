"""What a caller gets back for a request."""

from collections.abc import Iterable
from typing import Any

from serve.request import Pair, Request
from serve.tokenizer import Tokenizer

Triple = tuple[float | None, int, str | None]


def _triple(value: float | None, token: int, tokenizer: Tokenizer | None) -> Triple:
    return value, token, tokenizer.token_text(token) if tokenizer else None


def _triples(
    values: Iterable[float | None], ids: Iterable[int], tokenizer: Tokenizer | None
) -> list[Triple]:
    return [_triple(value, token, tokenizer) for value, token in zip(values, ids, strict=True)]


def _lists(rows: list[list[Pair]], tokenizer: Tokenizer | None) -> list[list[Triple]]:
    return [[_triple(value, token, tokenizer) for value, token in row] for row in rows]


def _output_logprobs(request: Request, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Log-probabilities of the output, by SGLang's names."""
    if not request.returns_output_logprobs:
        return {}
    info: dict[str, Any] = {
        "output_token_logprobs": _triples(request.output_logprobs, request.output_ids, tokenizer)
    }
    if request.num_output_top:
        info["output_top_logprobs"] = _lists(request.output_top_logprobs, tokenizer)
    if request.token_ids_logprob:
        info["output_token_ids_logprobs"] = _lists(request.output_token_ids_logprobs, tokenizer)
    return info


def _input_logprobs(request: Request, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The same of the prompt, as far as they are known: nothing is before its first token."""
    start = request.input_start
    if start < 0:
        return {}
    values = [None, *request.input_logprobs]
    ids = request.prompt_ids[start : start + len(values)]
    info: dict[str, Any] = {"input_token_logprobs": _triples(values, ids, tokenizer)}
    if request.num_input_top:
        info["input_top_logprobs"] = [None, *_lists(request.input_top_logprobs, tokenizer)]
    if request.token_ids_logprob:
        rows = _lists(request.input_token_ids_logprobs, tokenizer)
        info["input_token_ids_logprobs"] = [None, *rows]
    return info


def _timing(request: Request) -> dict[str, float]:
    """Seconds from arrival, and tokens per second after the first."""
    if request.finished_s is None or request.started_s is None:
        return {}
    timing = {
        "e2e_latency": request.finished_s - request.arrived_s,
        "queue_time": request.started_s - request.arrived_s,
    }
    if request.first_token_s is not None:
        timing["first_token_latency"] = request.first_token_s - request.arrived_s
        spent = request.finished_s - request.first_token_s
        if spent > 0:
            timing["decode_throughput"] = (len(request.output_ids) - 1) / spent
    return timing


def _speculation(request: Request, width: int) -> dict[str, Any]:
    """What became of the drafts, by SGLang's names; rates are of the full width."""
    counts = request.spec
    proposed = counts.num_rounds * (width - 1)
    return {
        "spec_verify_ct": counts.num_rounds,
        "spec_num_proposed_drafts": proposed,
        "spec_num_correct_drafts": counts.num_accepted,
        "spec_accept_rate": counts.num_accepted / proposed if proposed else 0.0,
        "spec_accept_length": (
            len(request.output_ids) / counts.num_rounds if counts.num_rounds else 0.0
        ),
        "spec_correct_drafts_histogram": list(counts.histogram),
        # The name before SGLang 0.5.
        "spec_accept_histogram": list(counts.histogram),
        "spec_verified_by_position": list(counts.verified_at),
        "spec_accepted_by_position": list(counts.accepted_at),
    }


def meta_info(request: Request, tokenizer: Tokenizer | None, window: int = 1) -> dict[str, Any]:
    """Everything about a request but its text and ids.

    Args:
      window: rows of a verify window; 1 without speculation.
    """
    info: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": request.finish_reason,
        "prompt_tokens": request.prompt_len,
        "completion_tokens": len(request.output_ids),
        "cached_tokens": 0,
        "num_retractions": request.num_retractions,
        "sampling_seed": request.seed,
        **_timing(request),
        **_input_logprobs(request, tokenizer),
        **_output_logprobs(request, tokenizer),
    }
    if window > 1:
        info |= _speculation(request, window)
    if request.state_digests is not None:
        info["state_digests"] = request.state_digests
    return info
