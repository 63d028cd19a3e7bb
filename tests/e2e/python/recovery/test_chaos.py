"""Training under disturbances ends in the bits of an undisturbed run; the short form of tests/e2e/chaos/run."""

import socket
import struct
import sys
import threading
from pathlib import Path

import pytest
from conftest import server_binary

sys.path.insert(0, str(Path(__file__).parents[2] / "chaos"))

import chaos
import links

SEED, EVENTS, STEPS = 2, 12, 14  # of every kind


def test_a_disturbed_run_ends_bitwise_where_an_undisturbed_one_does(tmp_path):
    report = chaos.campaign(tmp_path, binary=server_binary(), seed=SEED, events=EVENTS, steps=STEPS, shards=3, link_kind="proxy")
    print(report)
    assert report["events"] == EVENTS
    assert report["trainers"]["conflicts"] == 0 == report["server"].get("conflict", 0)


def test_the_same_seed_draws_the_same_events():
    events = chaos.draw_events(SEED, EVENTS, STEPS)
    assert events == chaos.draw_events(SEED, EVENTS, STEPS) != chaos.draw_events(SEED + 1, EVENTS, STEPS)
    assert {event.kind for event in events} == set(chaos.KINDS)


def test_runs_that_differ_are_told(tmp_path, monkeypatch):
    """Else the first test could not fail."""
    finish = chaos.Run.finish

    def differ(run):
        return {**finish(run), "step": str(run.directory)}

    monkeypatch.setattr(chaos.Run, "finish", differ)
    with pytest.raises(chaos.Failure, match="the runs differ"):
        chaos.campaign(tmp_path, binary=server_binary(), seed=5, events=0, steps=1, shards=1, link_kind="proxy")


def test_a_proxy_outlives_connections_that_are_reset_as_they_come():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def echo():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    try:
                        connection.sendall(connection.recv(5))
                    except OSError:
                        continue

        threading.Thread(target=echo, daemon=True).start()
        link = links.ProxyLink(server.getsockname()[1])
        host, port = link.address.split(":")
        for _ in range(300):
            with socket.create_connection((host, int(port)), timeout=20) as short:
                short.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(b"hello")
            assert connection.recv(5) == b"hello"
        link.close()
