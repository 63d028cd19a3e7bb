"""A server in deterministic mode: the gradient's bits do not depend on who comes when, or on a restart."""

import concurrent.futures

import numpy as np
import pytest
from conftest import running_server

import headwater

NUM_TOKENS, HIDDEN_SIZE, VOCAB_SIZE, MICRO_BATCHES = 24, 16, 40, 8
PATIENT = headwater.RetryPolicy(max_attempts=200, initial_backoff=0.05, max_backoff=0.25)


@pytest.fixture(scope="module")
def server():
    with running_server("--deterministic", "--ordered_window=6", "--shards=3") as server:
        yield server


@pytest.fixture
def data(rng):
    class Data:
        weight = rng.standard_normal((VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32)
        hidden = rng.standard_normal((MICRO_BATCHES, NUM_TOKENS, HIDDEN_SIZE)).astype(np.float32)
        targets = rng.integers(0, VOCAB_SIZE, (MICRO_BATCHES, NUM_TOKENS))

    return Data


def add(head, data, micro_batch):
    rows = data.hidden[micro_batch], data.targets[micro_batch]
    if micro_batch % 2:
        head.cross_entropy(*rows, micro_batch=micro_batch, commit="explicit").commit(0.3)
    else:
        assert head.cross_entropy(*rows, micro_batch=micro_batch).form == "HELD"


def test_order_trainers_and_restarts_do_not_show(server, data):
    with headwater.connect(server.address, retries=PATIENT, replay=True) as one:
        info = one.server_info()
        assert info.deterministic and info.limits["ordered_window"] == 6
        head = one.create_head("in-order", data.weight)
        head.save("first")
        for micro_batch in range(MICRO_BATCHES):
            add(head, data, micro_batch)
        expected = head.gradient()

        head = one.create_head("reversed", data.weight)
        head.save("first")
        add(head, data, 7)
        add(head, data, 2)
        server.restart()
        add(head, data, 0)
        with headwater.connect(server.address, retries=PATIENT) as two, concurrent.futures.ThreadPoolExecutor(3) as pool:
            heads = head, two.head("reversed"), two.head("reversed")
            for rank, micro_batches in enumerate(((6, 1), (3, 4), (5,))):
                for micro_batch in micro_batches:
                    pool.submit(add, heads[rank], data, micro_batch)
        head.seal(expected_micro_batches=MICRO_BATCHES, wait=True)
        np.testing.assert_array_equal(head.gradient(), expected)
