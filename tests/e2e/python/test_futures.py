"""Futures: `.result()` and `await`, many at once, cancelled ones, deadlines."""

import asyncio
import threading
import time

import numpy as np
import pytest
from expectations import refused

import headwater

NUM_TOKENS, HIDDEN_SIZE, VOCAB_SIZE = 8, 16, 40


@pytest.fixture
def rows(rng):
    return rng.standard_normal((NUM_TOKENS, HIDDEN_SIZE)).astype(np.float32), rng.integers(0, VOCAB_SIZE, NUM_TOKENS)


@pytest.fixture
def head(one_shard, make_head, rng):
    weight = rng.standard_normal((VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32)
    return make_head(one_shard.client, weight, optimizer=headwater.SGD(), staging_slots=2)


def test_every_blocking_call_has_a_future():
    for cls in (headwater.Client, headwater.Head):
        calls = [
            name
            for name, value in vars(cls).items()
            if callable(value) and not name.startswith("_") and not name.endswith("_future") and name != "close"
        ]
        assert calls and all(hasattr(cls, f"{name}_future") for name in calls), calls


def test_many_futures_add_up(head, rows):
    futures = [head.cross_entropy_future(*rows, micro_batch=index) for index in range(60)]
    outs = [future.result(60) for future in futures]
    assert all(future.done() for future in futures)
    assert {out.loss_sum for out in outs} == {outs[0].loss_sum}
    sealed = head.seal_future(expected_micro_batches=60).result(60)
    assert sealed.totals.micro_batch_count == 60
    gradient = head.gradient_future().result()
    head.discard_gradient_future().result()
    head.cross_entropy(*rows, micro_batch=0)
    np.testing.assert_allclose(gradient, 60 * head.gradient(), rtol=1e-5)


def test_await_in_asyncio(head, rows):
    async def step():
        outs = await asyncio.gather(*(head.cross_entropy_future(*rows, micro_batch=index) for index in range(8)))
        result = await head.apply_optimizer_step_future(learning_rate=0.1, expected_micro_batches=8)
        with refused("STEP_MISMATCH", headwater.StepMismatchError):
            await head.seal_future(step=0, expected_micro_batches=8)
        weight, info = await asyncio.gather(head.weight_future(), head.info_future())
        return outs, result, weight, info

    outs, result, weight, info = asyncio.run(step())
    assert len(outs) == 8 and result.open_step == 1 == head.step and info.weight_version == result.weight_version
    np.testing.assert_array_equal(weight, head.weight())


def test_await_does_not_block_the_event_loop(head, rows):
    async def run():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticker = asyncio.create_task(tick())
        await head.cross_entropy_future(*rows, micro_batch=0)
        ticker.cancel()
        return ticks

    assert asyncio.run(run()) > 1


def test_errors_come_out_of_futures(head, rows):
    future = head.cross_entropy_future(*rows, step=9, micro_batch=0)
    assert isinstance(future.exception(30), headwater.StepMismatchError)
    with refused("STEP_MISMATCH"):
        future.result()
    bad = head.cross_entropy_future(rows[0], [999] * NUM_TOKENS, micro_batch=0)
    with refused("TARGET_OUT_OF_VOCAB"):
        bad.result(30)


def test_callbacks_get_the_future(head):
    seen = []
    done = threading.Event()
    future = head.info_future()
    future.add_done_callback(lambda finished: (seen.append(finished), done.set()))
    assert done.wait(30) and seen == [future]


def test_a_call_that_takes_too_long_ends_in_time(remote, make_head, rng):
    weight = rng.standard_normal((20000, 256)).astype(np.float32)
    head = make_head(remote.client, weight)
    hidden = rng.standard_normal((4000, 256)).astype(np.float32)
    began = time.monotonic()
    with refused("DEADLINE_EXCEEDED", headwater.DeadlineExceededError) as info:
        head.cross_entropy(hidden, [1] * 4000, micro_batch=0, timeout_s=0.02)
    assert isinstance(info.value, TimeoutError) and time.monotonic() - began < 5
    # Whatever became of it, the step knows, and once settled it is in it once or not at all.
    deadline = time.monotonic() + 60
    while (state := head.step_state().open.micro_batches.get(0)) is not None and state.state == "IN_PROGRESS":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (head.gradient_norm() > 0) == (state is not None)


def test_cancel_ends_a_call(remote, make_head, rng):
    weight = rng.standard_normal((20000, 256)).astype(np.float32)
    head = make_head(remote.client, weight)
    hidden = rng.standard_normal((4000, 256)).astype(np.float32)
    future = head.cross_entropy_future(hidden, [1] * 4000, micro_batch=0)
    time.sleep(0.02)
    future.cancel()
    with refused("CANCELLED", headwater.CancelledError):
        future.result(30)

    async def cancelled():
        task = asyncio.ensure_future(_wait(head.cross_entropy_future(hidden, [1] * 4000, micro_batch=1)))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())


async def _wait(future):
    return await future
