"""The benchmarks' arithmetic and arguments, on numbers that are worked out by hand."""

import argparse

import pytest

from serve.cli import main
from serve.cli.bench_offline import last_throughput, measure, random_workload


def info(first: float, last: float, count: int) -> dict:
    """`meta_info` of a request."""
    return {"first_token_latency": first, "e2e_latency": last, "completion_tokens": count}


@pytest.mark.parametrize(
    ("infos", "expected"),
    [
        # 10 tokens between second 0 and 2 after the first: 5 of them in the last second.
        ([info(0.0, 2.0, 11)], 5.0),
        # One ended before the last second, one began in it.
        ([info(0.0, 1.0, 11), info(2.5, 3.0, 3)], 3.0),
        # Shorter than a second: all tokens over what it took.
        ([info(0.25, 0.5, 6)], 12.0),
        # A single token at the very end.
        ([info(4.0, 4.0, 1)], 1.0),
    ],
)
def test_last_throughput_counts_the_last_second(infos, expected):
    assert last_throughput(infos) == pytest.approx(expected)


def settings(**more) -> argparse.Namespace:
    """Arguments of `bench-offline`."""
    base = {"random_input_len": 30, "random_output_len": 5, "num_prompts": 200, "seed": 3}
    return argparse.Namespace(**{**base, "random_range_ratio": 0.5, **more})


def test_random_workloads_have_the_lengths_asked_for_and_can_be_had_again():
    workload = random_workload(settings(), 50)
    assert workload == random_workload(settings(), 50)
    assert workload != random_workload(settings(seed=4), 50)
    lengths = [len(prompt) for prompt in workload.prompts]
    assert (min(lengths), max(lengths)) == (15, 30)
    assert (min(workload.output_lens), max(workload.output_lens)) == (2, 5)
    assert {i for prompt in workload.prompts for i in prompt} == set(range(50))
    equal = random_workload(settings(random_range_ratio=1.0), 50)
    assert {len(prompt) for prompt in equal.prompts} == {30}


def test_figures_are_tokens_over_seconds():
    workload = random_workload(settings(num_prompts=2, random_range_ratio=1.0), 50)
    results = [{"meta_info": info(0.0, 2.0, 5)}, {"meta_info": info(0.0, 4.0, 5)}]
    figures = measure(workload, results, 4.0)
    assert figures["request_throughput"] == 0.5
    assert figures["input_throughput"] == 15.0
    assert figures["output_throughput"] == 2.5
    assert figures["total_throughput"] == 17.5


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["bench-one-batch", "--batch-size", "0"], "batch_size must be at least 1, got 0"),
        (["bench-one-batch", "--output-len", "4", "0"], "output_len must be at least 1, got 0"),
        (
            ["bench-one-batch", "--batch-size", "4", "--max-running-requests", "3"],
            "a batch of 4 does not fit --max-running-requests",
        ),
        (["bench-offline", "--num-prompts", "0"], "num_prompts must be at least 1, got 0"),
        (["bench-offline", "--random-range-ratio", "2"], "random_range_ratio must be in [0, 1]"),
        (["bench-offline", "--dataset-name", "sharegpt"], "(choose from random)"),
    ],
)
def test_sizes_that_cannot_be_are_exit_2(capsys, argv, message):
    assert main([*argv, "--model", "m"]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
