"""What a caller gets back for a request."""

from typing import Any

from serve.request import Request
from serve.tokenizer import Tokenizer


def _triples(
    logprobs: list[float], ids: list[int], tokenizer: Tokenizer | None
) -> list[tuple[float, int, str | None]]:
    text = tokenizer.token_text if tokenizer else lambda _: None
    return [(p, i, text(i)) for p, i in zip(logprobs, ids, strict=True)]


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


def meta_info(request: Request, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Everything about a request but its text and ids."""
    info: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": request.finish_reason,
        "prompt_tokens": request.prompt_len,
        "completion_tokens": len(request.output_ids),
        "cached_tokens": 0,
        "num_retractions": 0,
        "sampling_seed": request.seed,
        **_timing(request),
    }
    if request.return_logprob:
        info["output_token_logprobs"] = _triples(
            request.output_logprobs, request.output_ids, tokenizer
        )
    if request.score_prompt:
        scored = _triples(request.input_logprobs, request.prompt_ids[1:], tokenizer)
        first = request.prompt_ids[0]
        text = tokenizer.token_text(first) if tokenizer else None
        info["input_token_logprobs"] = [(None, first, text), *scored]
    if request.state_digests is not None:
        info["state_digests"] = request.state_digests
    return info


def visible_ids(request: Request) -> list[int]:
    """Output ids that show as text: a stop token, once it ended the request, does not."""
    reason = request.finish_reason or {}
    matched = reason.get("type") == "stop" and isinstance(reason.get("matched"), int)
    return request.output_ids[:-1] if matched else request.output_ids
