"""Many callers at once: threads, coroutines, aborts at every stage, the end with calls waiting."""

import asyncio
import concurrent.futures
import gc
import time

import pytest

from serve import EngineDeadError, StepError
from serve.request import Request
from tests.serve.engines import TEXTS, Gate, greedy, sampled, settle, start

LONG = 190


def wait_for_requests(engine, count: int) -> None:
    """Wait until that many requests are queued or run."""
    deadline_s = time.monotonic() + 20
    while len(engine.loop._calls) < count:
        assert time.monotonic() < deadline_s, "not submitted"
        time.sleep(0.001)


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        yield pool


# Threads.


def test_streams_of_many_threads_give_what_they_give_alone(engine, pool):
    prompts = [TEXTS[i % 3] for i in range(12)]
    params = [sampled(10 + 5 * i, sampling_seed=i) for i in range(12)]
    alone = [engine.generate(p, s) for p, s in zip(prompts, params, strict=True)]

    def read(prompt, params):
        last, num_ids = {}, 0
        for last in engine.generate(prompt, params, stream=True):
            assert len(last["output_ids"]) >= num_ids
            num_ids = len(last["output_ids"])
        return last

    lasts = list(pool.map(read, prompts, params))
    for last, whole in zip(lasts, alone, strict=True):
        assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])


def test_whole_calls_of_many_threads(engine, pool):
    alone = engine.generate(TEXTS, greedy(20))

    def call(index):
        if index % 2:
            return [engine.generate(text, greedy(20)) for text in TEXTS]
        return engine.generate(TEXTS, greedy(20))

    for outs in pool.map(call, range(16)):
        assert [r["output_ids"] for r in outs] == [r["output_ids"] for r in alone]


def test_a_new_request_enters_while_others_decode(engine, pool, gate):
    first = pool.submit(engine.generate, TEXTS[0], greedy(8), rid="first")
    gate.wait_for_step(1)
    second = pool.submit(engine.generate, TEXTS[1], greedy(2), rid="second")
    wait_for_requests(engine, 2)
    gate.let(1)
    gate.wait_for_step(2)
    assert gate.seen[1] == ["first", "second"]
    gate.open()
    assert len(first.result(20)["output_ids"]) == 8
    assert len(second.result(20)["output_ids"]) == 2


def test_a_slow_reader_gets_what_came_meanwhile_in_one_part(engine):
    stream = engine.generate(TEXTS[0], greedy(40), stream=True)
    first = next(stream)
    settle(engine)
    rest = list(stream)
    assert len(first["output_ids"]) < 40
    assert len(rest) <= 2 and len(rest[-1]["output_ids"]) == 40


def test_one_request_id_at_a_time(engine, pool, gate):
    first = pool.submit(engine.generate, TEXTS[0], greedy(3), rid="mine")
    gate.wait_for_step(1)
    with pytest.raises(ValueError, match="request id 'mine' is in use"):
        engine.generate(TEXTS[1], greedy(3), rid="mine")
    gate.open()
    assert first.result(20)["meta_info"]["finish_reason"]["type"] == "length"
    assert engine.generate(TEXTS[1], greedy(3), rid="mine")["meta_info"]["id"] == "mine"


# Coroutines.


def test_coroutines_side_by_side(engine):
    alone = [engine.generate(text, greedy(15)) for text in TEXTS]

    async def read(text):
        stream = await engine.async_generate(text, greedy(15), stream=True)
        return [part async for part in stream][-1]

    async def run():
        calls = [engine.async_generate(text, greedy(15)) for text in TEXTS]
        return await asyncio.gather(*calls, *(read(text) for text in TEXTS))

    outs = asyncio.run(run())
    for out, whole in zip(outs, alone * 2, strict=True):
        assert (out["text"], out["output_ids"]) == (whole["text"], whole["output_ids"])


def test_a_list_and_its_errors_for_a_coroutine(engine):
    async def run():
        return await engine.async_generate(["a", "", "b"], greedy(2), on_error="return")

    outs = asyncio.run(run())
    assert [len(r.get("output_ids", ())) for r in outs] == [2, 0, 2]
    assert outs[1]["error"]["index"] == 1


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("generate", "async_generate"),
        ("score", "async_score"),
        ("chat", "async_chat"),
        ("stream", "async_generate"),
    ],
)
def test_what_would_block_an_event_loop_is_refused(engine, name, instead):
    calls = {
        "generate": lambda: engine.generate("a"),
        "score": lambda: engine.score([1, 2]),
        "chat": lambda: engine.chat([{"role": "user", "content": "a"}]),
        "stream": lambda: engine.generate("a", stream=True),
    }

    async def run():
        with pytest.raises(RuntimeError, match=f"would block .* await {instead}$"):
            calls[name]()

    asyncio.run(run())


@pytest.mark.parametrize("name", ["generate", "chat", "score"])
def test_a_cancelled_call_ends_its_requests(engine, gate, name):
    calls = {
        "generate": lambda: engine.async_generate(TEXTS * 2, greedy(LONG)),
        "chat": lambda: engine.async_chat([[{"role": "user", "content": "a"}]] * 6, greedy(99)),
        "score": lambda: engine.async_score([[1] * LONG] * 6),
    }

    async def run():
        task = asyncio.create_task(calls[name]())
        await asyncio.to_thread(wait_for_requests, engine, 6)
        gate.let(2)
        await asyncio.to_thread(gate.wait_for_step, 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    gate.let(1)
    settle(engine)


def test_an_event_loop_that_is_gone_ends_its_requests(engine, gate):
    async def run():
        stream = await engine.async_generate(TEXTS[0], greedy(LONG), stream=True)
        task = asyncio.ensure_future(anext(stream))
        await asyncio.to_thread(wait_for_requests, engine, 1)
        return stream, task

    loop = asyncio.new_event_loop()
    stream, task = loop.run_until_complete(run())
    loop.close()
    gate.open()
    settle(engine)
    # Python would complain of a task that never ended, rightly.
    task._log_destroy_pending = False
    del stream, task


def test_a_coroutine_that_stops_reading_ends_its_request(engine):
    async def run():
        stream = await engine.async_generate(TEXTS[0], greedy(LONG), stream=True)
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(run())
    settle(engine)


# Aborts.


@pytest.mark.parametrize("stage", ["waiting", "prefill", "first token", "decode"])
def test_an_abort_at_every_stage(engine, pool, gate, stage):
    texts = TEXTS if stage == "waiting" else TEXTS[:2]
    beside = [pool.submit(engine.generate, text, greedy(30)) for text in texts]
    wait_for_requests(engine, len(texts))
    gate.wait_for_step(1)
    # A prompt of many chunks, or one that is done at once.
    prompt = [5] * (100 if stage == "prefill" else 3)
    call = pool.submit(engine.generate, input_ids=prompt, sampling_params=greedy(60), rid="it")
    wait_for_requests(engine, len(texts) + 1)
    num_steps = {"waiting": 1, "prefill": 3, "first token": 2, "decode": 12}[stage]
    gate.let(num_steps)
    gate.wait_for_step(num_steps + 1)
    engine.abort_request("it")
    gate.open()
    result = call.result(20)
    assert result["meta_info"]["finish_reason"] == {
        "type": "abort",
        "message": "aborted",
        "status_code": None,
    }
    assert (len(result["output_ids"]) > 0) == (stage in ("first token", "decode"))
    assert len(result["output_ids"]) < 60
    for other in beside:
        assert len(other.result(20)["output_ids"]) == 30


def test_aborts_of_all_of_samples_and_of_nobody(engine, pool, gate):
    calls = [pool.submit(engine.generate, t, greedy(LONG)) for t in TEXTS]
    samples = pool.submit(engine.generate, TEXTS[0], greedy(LONG, n=3), rid="several")
    wait_for_requests(engine, 6)
    engine.abort_request("nobody")
    engine.abort_request("several")
    gate.let(1)
    assert [r["meta_info"]["finish_reason"]["type"] for r in samples.result(20)] == ["abort"] * 3
    assert not any(call.done() for call in calls)
    engine.abort_request(abort_all=True)
    gate.open()
    for call in calls:
        assert call.result(20)["meta_info"]["finish_reason"]["type"] == "abort"
    with pytest.raises(ValueError, match="give the rid of a request, or abort_all=True"):
        engine.abort_request()


def test_an_aborted_stream_ends_with_what_there_is(engine, gate):
    stream = engine.generate(TEXTS[0], greedy(LONG), stream=True, rid="it")
    gate.let(5)
    assert next(stream)["meta_info"]["finish_reason"] is None
    gate.wait_for_step(6)
    engine.abort_request("it")
    gate.open()
    *_, last = stream
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert 1 <= len(last["output_ids"]) < LONG


def test_a_stream_that_is_dropped_in_another_thread(engine, pool):
    stream = engine.generate(TEXTS[0], greedy(LONG), stream=True)
    next(stream)
    box = [stream]
    del stream
    pool.submit(box.clear).result(10)
    gc.collect()
    settle(engine)


# What fails.


class Failure(Exception):
    """Something the engine does not expect."""


def test_a_failed_step_spares_those_that_took_no_part(engine, pool, gate, monkeypatch):
    # Three slots are taken; the fourth waits and is served afterwards.
    first = [pool.submit(engine.generate, text, greedy(20)) for text in TEXTS]
    wait_for_requests(engine, 3)
    waiting = pool.submit(engine.generate, TEXTS[0], greedy(6))
    wait_for_requests(engine, 4)
    gate.let(1)
    gate.wait_for_step(2)
    run, left = engine.core.runner.run, [1]

    def failing(work):
        if left and len(work) == 3:
            left.pop()
            raise Failure
        return run(work)

    monkeypatch.setattr(engine.core.runner, "run", failing)
    gate.open()
    for call in first:
        with pytest.raises(StepError, match="a step failed: Failure"):
            call.result(20)
    assert len(waiting.result(20)["output_ids"]) == 6
    assert not left


def test_a_request_that_fails_alone_harms_nobody_else(engine, monkeypatch):
    alone = engine.generate(TEXTS, greedy(9))
    take = Request.take

    def failing(self, result):
        if self.rid == "b" and len(self.output_ids) == 4:
            raise Failure("no text")
        return take(self, result)

    monkeypatch.setattr(Request, "take", failing)
    with pytest.raises(StepError, match="no text"):
        engine.generate(TEXTS, greedy(9), rid=["a", "b", "c"])
    settle(engine)
    outs = engine.generate(TEXTS, greedy(9), rid=["a", "b", "c"], on_error="return")
    assert outs[0]["output_ids"] == alone[0]["output_ids"]
    assert outs[2]["output_ids"] == alone[2]["output_ids"]
    message = "a step failed: Failure('no text')"
    assert outs[1] == {"error": {"message": message, "type": "StepError", "index": 1}}


def test_every_waiting_call_learns_that_the_thread_died(directory, pool, monkeypatch):
    with start(directory) as engine:

        def plan():
            raise Failure("the plan is bad")

        gate = Gate(engine, monkeypatch)
        streams = [engine.generate(text, greedy(LONG), stream=True) for text in TEXTS]
        for stream in streams:
            # One step may be on its way without it.
            gate.let(3)
            next(stream)
        calls = [pool.submit(engine.generate, text, greedy(LONG)) for text in TEXTS * 2]
        wait_for_requests(engine, 9)
        engine.core.plan = plan
        gate.open()
        for call in calls:
            with pytest.raises(EngineDeadError, match="died of .*the plan is bad") as raised:
                call.result(20)
            assert isinstance(raised.value.__cause__, Failure)
        for stream in streams:
            with pytest.raises(EngineDeadError, match="the plan is bad"):
                for _ in stream:
                    pass
        with pytest.raises(EngineDeadError, match="the plan is bad"):
            engine.generate("a")


def test_a_lost_state_ends_the_engine(directory, monkeypatch):
    with start(directory) as engine:
        monkeypatch.setattr(engine.core.runner, "is_whole", lambda: False)

        def failing(work):
            raise Failure("donated and gone")

        monkeypatch.setattr(engine.core.runner, "run", failing)
        with pytest.raises(EngineDeadError, match="donated and gone"):
            engine.generate("a", greedy(2))


def test_a_state_that_was_donated_and_not_returned_is_noticed(directory):
    with start(directory) as engine:
        runner = engine.core.runner
        assert runner.is_whole()
        state = runner._state
        engine.generate("a", greedy(2))
        assert runner.is_whole()
        runner._state = state
        assert not runner.is_whole()


def test_the_end_with_calls_waiting(directory, pool, monkeypatch):
    engine = start(directory)
    gate = Gate(engine, monkeypatch)
    thread = engine.loop._thread
    calls = [pool.submit(engine.generate, text, greedy(LONG)) for text in TEXTS * 2]
    gate.wait_for_step(1)
    ends = [pool.submit(engine.shutdown) for _ in range(3)]
    gate.open()
    for end in ends:
        end.result(20)
    for call in calls:
        with pytest.raises(EngineDeadError, match="the engine is shut down"):
            call.result(20)
    engine.shutdown()
    assert not thread.is_alive()


def test_an_engine_that_is_dropped_ends_its_thread(directory):
    engine = start(directory)
    engine.generate("a", greedy(2))
    thread = engine.loop._thread
    del engine
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()


def test_an_engine_that_goes_while_its_thread_holds_the_lock(directory):
    """A garbage collection may close the loop from the step thread itself."""
    engine = start(directory)
    loop, close = engine.loop, engine._close

    def close_within():
        with loop.between_steps():
            close()

    loop.call(close_within)
    loop._thread.join(20)
    assert not loop._thread.is_alive()
    with pytest.raises(EngineDeadError, match="the engine is shut down"):
        engine.generate("a")
