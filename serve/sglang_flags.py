"""Flags that other engines' users know, and how each is met here: the whole list, as data.

The names are SGLang's, with underscores: the same in Python, on the command line, in the
environment and in a file of options.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

_NO_SERVER = "there is no server yet"
_ONE_BUDGET = "memory_bytes is the one budget of the decode state"

# The same meaning under the same name.
HONOURED = frozenset(
    {
        "chunked_prefill_size",
        "config",
        "context_length",
        "disable_self_check",
        "dtype",
        "load_format",
        "log_level",
        "max_running_requests",
        "model_path",
        "model",
        "preferred_sampling_params",
        "sampling_defaults",
        "skip_tokenizer_init",
        "speculative_algorithm",
        "speculative_debug",
        "speculative_draft_model_path",
        "speculative_dspark_block_size",
        "speculative_num_draft_tokens",
        "stream_interval",
    }
)

# The same meaning under another name: the argument of `Engine`.
MAPPED: Mapping[str, str] = {"mamba_ssm_dtype": "state_dtype", "page_size": "block_size"}


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A flag that may only say what is so.

    Attributes:
      value: the one that is valid.
      why: what is so.
    """

    value: Any
    why: str


FIXED: Mapping[str, Fixed] = {
    "disable_radix_cache": Fixed(True, "no request takes over what another one computed"),
    "grammar_backend": Fixed("none", "there is no constrained decoding yet"),
    "kv_cache_dtype": Fixed("auto", "keys and values have the type of the activations"),
    "schedule_policy": Fixed("fcfs", "requests start in the order in which they come"),
    "tp_size": Fixed(1, "a model runs on one device"),
}

# Why there is none of it.
REFUSED: Mapping[str, str] = {
    "admin_api_key": _NO_SERVER,
    "allow_auto_truncate": "a request that is too long is an error; lower max_new_tokens",
    "allow_insecure_bind": _NO_SERVER,
    "api_key": _NO_SERVER,
    "api_key_file": _NO_SERVER,
    "chat_template": "the template is that of the model directory",
    "decode_log_interval": _NO_SERVER,
    "device": "JAX chooses the device, as its own JAX_PLATFORMS says",
    "enable_metrics": _NO_SERVER,
    "enable_ssl_refresh": _NO_SERVER,
    "grpc_services": _NO_SERVER,
    "host": _NO_SERVER,
    "json_model_override_args": "a model is what its config.json says",
    "log_requests": _NO_SERVER,
    "log_requests_level": _NO_SERVER,
    "mamba_track_interval": "states are kept at the end of every block; page_size sets its tokens",
    "max_mamba_cache_size": "the number of state slots follows from max_running_requests",
    "max_prefill_tokens": "chunked_prefill_size bounds the prompt tokens of a step",
    "max_queued_requests": _NO_SERVER,
    "max_queued_tokens": _NO_SERVER,
    "max_total_tokens": _ONE_BUDGET,
    "mem_fraction_static": _ONE_BUDGET,
    "metrics_port": _NO_SERVER,
    "port": _NO_SERVER,
    "quantization": "quantised weights are not supported",
    "queue_timeout": _NO_SERVER,
    "random_seed": "the noise belongs to a request, whose sampling parameter seed fixes it",
    "reasoning_parser": "thinking is not told apart from the answer",
    "request_timeout": _NO_SERVER,
    "revision": "nothing is downloaded: model_path names a directory",
    "served_model_name": _NO_SERVER,
    "shutdown_timeout": _NO_SERVER,
    "speculative_num_steps": "speculative_num_draft_tokens sets the width, which is one more",
    "ssl_ca_certs": _NO_SERVER,
    "ssl_certfile": _NO_SERVER,
    "ssl_keyfile": _NO_SERVER,
    "stall_timeout": _NO_SERVER,
    "tokenizer_path": "the tokenizer is that of the model directory",
    "watchdog_timeout": _NO_SERVER,
}


def refusal(name: str, *, spelling: str) -> str | None:
    """Why a flag is refused, in a sentence that names it; None for any other.

    Args:
      spelling: how it was given.
    """
    why = REFUSED.get(name)
    return None if why is None else f"{spelling} is not supported: {why}"


def engine_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `Engine` by our names; those that only say what is so are left out.

    Raises:
      ValueError: one that is refused, a value that is not so, or one thing under two names.
    """
    fields: dict[str, Any] = {}
    for name, value in given.items():
        if problem := refusal(name, spelling=name):
            raise ValueError(problem)
        if name in FIXED:
            _require_so(name, value)
            continue
        field = MAPPED.get(name, name)
        if field in fields:
            raise ValueError(f"{field} is given twice, under two names")
        fields[field] = value
    return fields


def _require_so(name: str, value: Any) -> None:
    fixed = FIXED[name]
    if type(value) is not type(fixed.value) or value != fixed.value:
        raise ValueError(f"{name} can only be {fixed.value!r}, got {value!r}: {fixed.why}")
