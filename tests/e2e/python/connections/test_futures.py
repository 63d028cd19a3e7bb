"""Futures: `.result()` and `await`, many at once, cancelled ones, deadlines."""

import asyncio
import threading
import time

import numpy as np
import pytest
from conftest import HIDDEN_SIZE, NUM_TOKENS, VOCAB_SIZE
from expectations import eventually, refused

import headwater
import headwater.local

# Methods that ask nothing of the server.
NO_CALLS = ("close", "teacher", "empty_rows")


@pytest.fixture
def head(each_way, make_head, weight):
    return make_head(each_way.client, weight, optimizer=headwater.SGD(), staging_slots=2)


def test_every_blocking_call_has_a_future():
    for cls in (headwater.Client, headwater.Head, headwater.Teacher):
        calls = [
            name
            for name, value in vars(cls).items()
            if callable(value) and not name.startswith("_") and not name.endswith("_future") and name not in NO_CALLS
        ]
        assert calls and all(hasattr(cls, f"{name}_future") for name in calls), calls


def test_await_in_asyncio(head, rows):
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async def step():
        ticker = asyncio.create_task(tick())
        outs = await asyncio.gather(*(head.cross_entropy_future(*rows, micro_batch=index) for index in range(8)))
        result = await head.apply_optimizer_step_future(learning_rate=0.1, expected_micro_batches=8)
        with refused("STEP_MISMATCH", headwater.StepMismatchError):
            await head.seal_future(step=0, expected_micro_batches=8)
        weight, info = await asyncio.gather(head.weight_future(), head.info_future())
        ticker.cancel()
        return outs, result, weight, info

    outs, result, weight, info = asyncio.run(step())
    assert len(outs) == 8 and result.open_step == 1 == head.step and info.weight_version == result.weight_version
    np.testing.assert_array_equal(weight, head.weight())
    assert ticks > 1  # no await blocks the event loop


def test_errors_come_out_of_futures_and_callbacks_get_them(head, rows):
    seen, done = [], threading.Event()
    future = head.cross_entropy_future(*rows, step=9, micro_batch=0)
    future.add_done_callback(lambda finished: (seen.append(finished), done.set()))
    assert isinstance(future.exception(30), headwater.StepMismatchError) and done.wait(30) and seen == [future]
    with refused("TARGET_OUT_OF_VOCAB"):
        head.cross_entropy_future(rows[0], [999] * NUM_TOKENS, micro_batch=0).result(30)


def in_it_once_or_not_at_all(head, rows, micro_batch):
    """Whatever became of a call that was given up, repeating it leaves the contribution in the step exactly once."""

    def state():
        known = head.step_state().open.micro_batches.get(micro_batch)
        return known and known.state

    eventually(lambda: state() != "IN_PROGRESS")
    there = state() is not None
    out = head.cross_entropy(*rows, micro_batch=micro_batch)
    assert out.replayed == there
    gradient = head.gradient()
    head.discard_gradient()
    head.cross_entropy(*rows, micro_batch=0)
    np.testing.assert_array_equal(gradient, head.gradient())
    head.discard_gradient()


def test_a_call_behind_abandoned_contributions_keeps_to_its_own_timeout(slow, rows):
    """Discarding them may take as long as the client's time-out, two minutes."""
    server, head, _ = slow
    weight = np.zeros((VOCAB_SIZE, HIDDEN_SIZE), np.float32)
    calls = (
        lambda bound: head.seal(expected_micro_batches=0, timeout_s=bound),
        lambda bound: head.cross_entropy(*rows, micro_batch=1, timeout_s=bound),
        lambda bound: head.cross_entropy_future(*rows, micro_batch=1, timeout_s=bound).result(30),
        lambda bound: head.step_state_future(timeout_s=bound).result(30),
        lambda bound: head.seal_future(expected_micro_batches=0, timeout_s=bound).result(30),
        lambda bound: head.apply_optimizer_step_future(learning_rate=0.1, timeout_s=bound).result(30),
        lambda bound: head.discard_gradient_future(timeout_s=bound).result(30),
        lambda bound: head.replace_weight_future(weight, timeout_s=bound).result(30),
        lambda bound: head.delete_future(timeout_s=bound).result(30),
    )
    with server.frozen():
        head._backend.abandon(head._key(None), 0)()
        began = time.monotonic()
        for call in calls:
            with refused("DEADLINE_EXCEEDED", headwater.DeadlineExceededError):
                call(0.2)
        cancelled = head.seal_future(expected_micro_batches=0)
        time.sleep(0.1)
        cancelled.cancel()
        with refused("CANCELLED", headwater.CancelledError):
            cancelled.result(30)
        assert time.monotonic() - began < 30
    assert head.seal(expected_micro_batches=0).totals.micro_batch_count == 0


def test_calls_that_take_too_long_or_are_cancelled_end(slow, rows):
    server, head, _ = slow
    with server.frozen():
        began = time.monotonic()
        with refused("DEADLINE_EXCEEDED", headwater.DeadlineExceededError) as info:
            head.cross_entropy(*rows, micro_batch=3, timeout_s=0.2)
        assert isinstance(info.value, TimeoutError) and 0.1 < time.monotonic() - began < 10
        calls = head.cross_entropy_future(*rows, micro_batch=1), head.info_future()
        time.sleep(0.1)
        for call in calls:
            call.cancel()
        for call in calls:
            with refused("CANCELLED", headwater.CancelledError):
                call.result(30)
    for micro_batch in (3, 1):
        in_it_once_or_not_at_all(head, rows, micro_batch)


def test_a_cancelled_task_cancels_the_call(slow, rows):
    server, head, _ = slow
    future = None

    async def call():
        nonlocal future
        future = head.cross_entropy_future(*rows, micro_batch=2)
        return await future

    async def run():
        task = asyncio.create_task(call())
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with server.frozen():
        asyncio.run(run())
        assert future is not None and (future.done() or isinstance(future.exception(30), headwater.CancelledError))
    in_it_once_or_not_at_all(head, rows, 2)


def test_futures_of_a_closed_client_say_so(backends, rows):
    for connect in (lambda: headwater.connect(backends("remote-1").address), headwater.local.connect):
        with connect() as client:
            head = client.create_head("closed", np.ones((VOCAB_SIZE, HIDDEN_SIZE), np.float32))
            head.delete()
        for future in (
            client.health_future(),
            client.heads_future(),
            head.info_future(),
            head.cross_entropy_future(*rows, micro_batch=0),
        ):
            with pytest.raises(headwater.ClientClosedError):
                future.result(60)
