"""A teacher's rows from a stream of their own, and the micro-batches that join them."""

import contextlib

import numpy as np
import pytest
import torch
from expectations import refused

import headwater
from headwater._futures import LOSS_THREADS

NUM_TOKENS, HIDDEN_SIZE, TEACHER_SIZE, VOCAB_SIZE = 24, 16, 12, 40


@pytest.fixture
def student(each_way, make_head, weight):
    return make_head(each_way.client, weight, optimizer=headwater.SGD(), staging_slots=2)


@pytest.fixture
def teacher(each_way, make_head, rng):
    weight = rng.standard_normal((VOCAB_SIZE, TEACHER_SIZE)).astype(np.float32)
    return make_head(each_way.client, weight, trainable=False)


@pytest.fixture
def rows(rng):
    return [rng.standard_normal((NUM_TOKENS, size)).astype(np.float32) for size in (HIDDEN_SIZE, TEACHER_SIZE)]


@pytest.fixture
def key(request):
    """A key of the test's own."""
    return request.node.name


def same(out, expected):
    np.testing.assert_array_equal(out.grad_hidden, expected.grad_hidden)
    assert out.loss_sum == expected.loss_sum and out.valid_token_count == expected.valid_token_count


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_streams_do_not_queue_up_behind_the_losses_that_wait_for_them(each_way, student, teacher, rows, key):
    """As many losses as may be under way at once, then a gradient, then all the streams."""
    hidden, teacher_hidden = rows
    with contextlib.ExitStack() as stack:
        clients = [each_way.client]
        if each_way.address:
            clients.append(stack.enter_context(headwater.connect(each_way.address, replay=True)))
        for number, client in enumerate(clients):
            head, teacher_head, first = client.head(student.name), client.head(teacher.name), 100 * number
            joins = [{"join_key": f"{key}-{first + index}", "total_rows": NUM_TOKENS} for index in range(LOSS_THREADS)]
            losses = [
                head.jsd_future(hidden, teacher_head, headwater.JOIN, **join, micro_batch=first + index, timeout_s=30)
                for index, join in enumerate(joins)
            ]
            gradient = head.add_gradient_future(hidden[:1], micro_batch=first + LOSS_THREADS, timeout_s=30)
            assert gradient.result(20) is False and not any(loss.done() for loss in losses)
            streams = [client.teacher(**join).stream_future(teacher_hidden, timeout_s=30) for join in joins]
            assert [stream.result(20) for stream in streams] == [NUM_TOKENS] * LOSS_THREADS
            assert len({loss.result(20).loss_sum for loss in losses}) == 1


def test_rows_of_several_streams_and_any_order(student, teacher, rows, key, rng):
    hidden, _ = rows
    total = 2 * NUM_TOKENS
    order = rng.permutation(total)
    everything = rng.standard_normal((total, TEACHER_SIZE)).astype(np.float32)
    wanted = np.flatnonzero(np.arange(total) % 2)[::-1]
    expected = student.jsd(hidden, teacher, everything[wanted], micro_batch=0)
    stream = headwater.Client(student._backend).teacher(key, total_rows=total)
    for part in np.array_split(order, 5):
        assert stream.stream(everything[part], part) == len(part)
    out = student.jsd(hidden, teacher, headwater.JOIN, join_key=key, total_rows=total, row_indices=wanted, micro_batch=1)
    same(out, expected)


def test_another_type_of_the_teachers_rows_is_refused(student, teacher, rows, key):
    hidden, teacher_hidden = rows
    stream = headwater.Client(student._backend).teacher(key, total_rows=NUM_TOKENS)
    stream.stream(teacher_hidden[:2], [0, 1])
    join = {"join_key": key, "total_rows": NUM_TOKENS, "micro_batch": 0, "timeout_s": 5, "teacher_dtype": "float16"}
    for call in (
        lambda: stream.stream(teacher_hidden[:1].astype(np.float16), [5]),
        lambda: student.jsd(hidden, teacher, headwater.JOIN, **join),
        lambda: student.jsd_future(hidden, teacher, headwater.JOIN, **join).result(30),
    ):
        with refused("JOIN_INCOMPLETE") as info:
            call()
        assert "teacher_dtype=" in str(info.value)


def test_arguments_are_checked_before_anything_is_sent(student, teacher, rows):
    hidden, teacher_hidden = rows
    join = {"join_key": "key", "total_rows": NUM_TOKENS}
    bad = [
        ("INVALID_FIELD", {**join, "join_key": ""}),
        ("INVALID_FIELD", {**join, "join_key": "k" * 257}),
        ("INVALID_FIELD", {**join, "join_key": None}),
        ("INVALID_FIELD", {**join, "total_rows": 0}),
        ("SHAPE_MISMATCH", {**join, "total_rows": NUM_TOKENS - 1}),
        ("SHAPE_MISMATCH", {**join, "row_indices": [0]}),
        ("INVALID_FIELD", {**join, "row_indices": [NUM_TOKENS] * NUM_TOKENS}),
        ("INVALID_FIELD", {**join, "row_indices": [-1] * NUM_TOKENS}),
    ]
    for reason, arguments in bad:
        with refused(reason, headwater.InvalidArgumentError):
            student.jsd(hidden, teacher, headwater.JOIN, **arguments, micro_batch=0)
    for name, value in {**join, "row_indices": range(NUM_TOKENS), "teacher_dtype": "float32"}.items():
        with refused("INVALID_COMBINATION", headwater.InvalidArgumentError):
            student.jsd(hidden, teacher, teacher_hidden, **{name: value}, micro_batch=0)
    stream = headwater.Client(student._backend).teacher("key", total_rows=NUM_TOKENS)
    for reason, arguments in (
        ("SHAPE_MISMATCH", (teacher_hidden[:3],)),
        ("SHAPE_MISMATCH", (teacher_hidden[0], [0])),
        ("INVALID_FIELD", (teacher_hidden[:0], [])),
        ("INVALID_FIELD", (teacher_hidden[:1], [NUM_TOKENS])),
    ):
        with refused(reason, headwater.InvalidArgumentError):
            stream.stream(*arguments)
    for arguments in ({"join_key": "", "total_rows": 1}, {"join_key": "k", "total_rows": 0}, {"join_key": "k", "total_rows": 1.5}):
        with pytest.raises(headwater.InvalidArgumentError):
            headwater.Client(student._backend).teacher(**arguments)


def test_terms_join_teachers_of_their_own(student, teacher, rows, key):
    hidden, teacher_hidden = rows
    half = NUM_TOKENS // 2
    terms = [
        headwater.JSD(teacher, headwater.JOIN, rows=(0, half), join_key=key, total_rows=half),
        headwater.JSD(teacher, teacher_hidden[half:], rows=(half, NUM_TOKENS), beta=0.25),
    ]
    future = student.multi_future(hidden, terms, micro_batch=0)
    headwater.Client(student._backend).teacher(key, total_rows=half).stream(teacher_hidden[:half])
    terms[0] = headwater.JSD(teacher, teacher_hidden[:half], rows=(0, half))
    same(future.result(30), student.multi(hidden, terms, micro_batch=1))


def test_ignored_rows_use_theirs_up(student, teacher, rows, key):
    hidden, teacher_hidden = rows
    targets = np.where(np.arange(NUM_TOKENS) % 2, -100, 1)
    headwater.Client(student._backend).teacher(key, total_rows=NUM_TOKENS).stream(teacher_hidden)
    out = student.jsd(hidden, teacher, headwater.JOIN, join_key=key, total_rows=NUM_TOKENS, targets=targets, micro_batch=0)
    same(out, student.jsd(hidden, teacher, teacher_hidden, targets=targets, micro_batch=1))
    # All of them: the whole set may come again.
    again = torch.from_numpy(teacher_hidden).reshape(3, NUM_TOKENS // 3, -1)
    assert headwater.Client(student._backend).teacher(key, total_rows=NUM_TOKENS).stream(again) == NUM_TOKENS
