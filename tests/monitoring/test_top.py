"""headwaterctl top: figures of a real run, and of pages that are made up."""

import contextlib
import http.server
import json
import os
import pty
import select
import subprocess
import threading

import pytest
from monitored_run import Server, eventually, running, training
from servers import program

# The outcomes of a step of the training, and of two.
OUTCOMES = ("committed", "staged", "replayed", "discarded")
TRANSPORTS = ("grpc", "shared_memory")
PHASES = {"upload", "queue", "compute", "download", "commit"}


@pytest.fixture(scope="module")
def server():
    with running() as server:
        yield server


def command(server: Server, *flags: str) -> list[str]:
    return [program("headwaterctl"), f"--server={server.address}", "top", *flags]


def top(server: Server, *flags: str) -> subprocess.CompletedProcess:
    return subprocess.run(command(server, *flags), capture_output=True, text=True, timeout=60)


def look(server: Server, address: str, interval: str = "100ms") -> dict:
    """One look at the page at this address, as JSON."""
    done = top(server, "--once", "--json", f"--interval={interval}", f"--metrics={address}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@contextlib.contextmanager
def pages(*answers: str, status: int = 200):
    """An HTTP server whose answers are these, the last one again and again; its address."""
    left = list(answers)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = (left.pop(0) if len(left) > 1 else left[0]).encode(errors="surrogateescape")
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        try:
            yield f"127.0.0.1:{web.server_port}"
        finally:
            web.shutdown()


def test_top_shows_a_real_run(server):
    with training(server.address) as steps:
        eventually(lambda: steps() >= 2, "two steps")
        metrics = f"127.0.0.1:{server.metrics_port()}"

        # On a busy machine a step may take long: the next look is over twice the time.
        intervals = iter([2, 4, 8, 16, 30, 30, 30, 30])

        def look_at_steps() -> dict:
            found = look(server, metrics, f"{next(intervals)}s")
            whole = set(found["phase_seconds"]) == PHASES
            whole = whole and all(found["micro_batches_per_s"][outcome] > 0 for outcome in OUTCOMES)
            return found if whole and all(found["transports"][name]["bytes_in_per_s"] > 0 for name in TRANSPORTS) else {}

        def look_at_commits() -> subprocess.CompletedProcess | None:
            found = top(server, "--once", "--interval=1s", f"--metrics={metrics}")
            return found if found.returncode != 0 or "committed" in found.stdout else None

        seen = eventually(look_at_steps, "a look with all of two steps", timeout_s=300)
        text = eventually(look_at_commits, "a look with a micro-batch that was added", timeout_s=300)
    assert seen["serving"] and seen["engine"] == "cpu" and seen["version"]
    assert seen["tokens_per_s"] > 0 and 0 < seen["busy"] <= 1 and 0 < seen["floor_utilization"]
    assert 0 < seen["chunk_fill"] <= 1
    memory = seen["memory"]
    assert memory["planned_by_purpose"]["weight"] > 0
    assert memory["planned_bytes"] == sum(memory["planned_by_purpose"].values()) <= memory["budget_bytes"]
    assert memory["resident_bytes"] > 1 << 20
    assert {head["name"].split("/")[-1] for head in seen["heads"]} == {"student", "teacher"}

    assert text.returncode == 0, text.stderr
    assert "\x1b" not in text.stdout
    words = ("SERVING", "tokens/s", "committed", "of the floor", "compute", "shared_memory", "optimizer_state", "student", "frozen")
    for word in words:
        assert word in text.stdout, text.stdout


PAGE = """\
# HELP headwater_serving x
# TYPE headwater_serving gauge
headwater_serving 1
headwater_build_info{{version="a\\"b,c}}d",engine="cpu"}} 1
headwater_tokens_total{{loss="cross_entropy"}} {tokens}
headwater_tokens_total{{loss="jensen_shannon"}} 7
headwater_refusals_total{{reason="QUEUE_FULL"}} {refusals}
headwater_refusals_total{{reason="INTERNAL"}} 3
headwater_compute_seconds_sum {sum}
headwater_compute_seconds_count {count} 1700000000000
headwater_compute_busy_seconds_total {sum}
headwater_product_flops_total {flops}
headwater_memory_planned_bytes{{purpose="weight"}} 3e+09
headwater_memory_planned_bytes{{purpose="bias"}} 0
"""
IDLE = PAGE.format(tokens=1, refusals=0, sum=0, count=0, flops=0)


def test_figures_are_differences_of_pages(server):
    before = PAGE.format(tokens=1000, refusals=50, sum=0.5, count=10, flops=1e9)
    after = PAGE.format(tokens=5000, refusals=8, sum=0.75, count=20, flops=2e9)
    with pages(before, after) as address:
        seen = look(server, address, "500ms")
    assert seen["version"] == 'a"b,c}d'
    assert seen["tokens_per_s"] == pytest.approx(4000 / seen["seconds"])
    # A counter that fell has restarted.
    assert seen["refusals_per_s"] == pytest.approx({"QUEUE_FULL": 8 / seen["seconds"]})
    assert seen["phase_seconds"] == {"compute": pytest.approx(0.025)}
    assert seen["product_flops_per_busy_s"] == pytest.approx(4e9)
    assert seen["floor_utilization"] is None  # the machine's rate is unknown
    assert seen["memory"]["planned_by_purpose"] == {"weight": 3e9}


def test_ranks_of_a_group_are_told_apart(server):
    def page(first: tuple, last: tuple) -> str:
        lines = [
            f'headwater_rank_seconds_total{{rank="{rank}",activity="{activity}"}} {seconds}'
            for rank, times in ((0, first), (10, last))
            for activity, seconds in zip(("compute", "wait", "communicate"), times, strict=True)
        ]
        return "headwater_serving 1\n" + "\n".join(lines) + "\n"

    before, after = page((10, 20, 30), (1, 2, 3)), page((10.5, 20.25, 30), (1, 2.125, 3.0625))
    with pages(before, after) as address:
        seen = look(server, address, "1s")
    share = pytest.approx
    assert seen["ranks"] == [
        {"rank": 0, "compute": share(0.5 / seen["seconds"]), "wait": share(0.25 / seen["seconds"]), "communicate": 0},
        {"rank": 10, "compute": 0, "wait": share(0.125 / seen["seconds"]), "communicate": share(0.0625 / seen["seconds"])},
    ]
    with pages(before, after) as address:
        text = top(server, "--once", "--interval=1s", f"--metrics={address}").stdout
    assert "rank 10" in text and "% computes, " in text, text


def test_nothing_done_is_told_as_nothing(server):
    with pages(IDLE) as address:
        text = top(server, "--once", "--interval=100ms", f"--metrics={address}")
    assert text.returncode == 0, text.stderr
    assert "0 % busy" in text.stdout and "of the floor" not in text.stdout and " nan" not in text.stdout.lower()


@pytest.mark.parametrize(
    ("answer", "status", "complaint"),
    [
        ("headwater_serving 1\n", 404, "the answer is HTTP/1.0 404"),
        ("up 1\n", 200, "is not headwaterd's"),
        ("headwater_serving one\n", 200, "not a line of a page of metrics: headwater_serving one"),
        ('headwater_serving{a="b 1\n', 200, "not a line of a page of metrics"),
        ("<html>\n", 200, "not a line of a page of metrics: <html>"),
        ("", 200, "is not headwaterd's"),
    ],
)
def test_other_answers_are_refused(server, answer, status, complaint):
    with pages(answer, status=status) as address:
        done = top(server, "--once", f"--metrics={address}")
    assert done.returncode == 1 and complaint in done.stderr, done.stderr


def test_a_server_without_metrics_is_told(server):
    done = top(server, "--once", "--metrics=127.0.0.1:1")
    assert done.returncode == 1 and "cannot get http://127.0.0.1:1/metrics: Connection refused" in done.stderr
    assert "--metrics says where to look" in done.stderr and "--server" not in done.stderr


@pytest.mark.parametrize(
    "flags", [("--interval=99ms",), ("--metrics=nowhere",), ("--metrics=:9464",), ("--metrics=host:",), ("more",)]
)
def test_wrong_command_lines_end_with_two(server, flags):
    assert top(server, "--once", *flags).returncode == 2


def test_on_a_terminal_a_look_replaces_the_last_one(server):
    leader, follower = pty.openpty()
    environment = dict(os.environ, TERM="xterm")
    flags = ("--interval=100ms", f"--metrics=127.0.0.1:{server.metrics_port()}")
    process = subprocess.Popen(command(server, *flags), stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    seen = b""

    def more() -> bool:
        nonlocal seen
        if select.select([leader], [], [], 0.1)[0]:
            seen += os.read(leader, 65536)
        return seen.count(b"\x1b[H") >= 3

    try:
        eventually(more, "three looks")
        assert process.poll() is None
        assert b"SERVING" in seen and b"\x1b[J" in seen
    finally:
        process.kill()
        process.wait()
        os.close(leader)


def test_into_a_pipe_looks_follow_each_other_without_escapes(server):
    flags = ("--interval=100ms", f"--metrics=127.0.0.1:{server.metrics_port()}")
    with subprocess.Popen(
        command(server, *flags), stdout=subprocess.PIPE, text=True, env=dict(os.environ, TERM="xterm")
    ) as process:
        lines = []
        while sum(line.startswith("throughput") for line in lines) < 2:
            line = process.stdout.readline()
            assert line, lines
            lines.append(line)
        process.kill()
    assert not any("\x1b" in line for line in lines)


def test_control_characters_do_not_reach_the_terminal(server):
    page = IDLE.replace('a\\"b,c}d', "1\x1b]0;title\x07\x7f\u009b2J")
    assert "\x1b" in page
    with pages(page) as address:
        done = top(server, "--once", "--interval=100ms", f"--metrics={address}")
        seen = look(server, address)
    assert done.returncode == 0, done.stderr
    assert "1\\x1b]0;title\\x07\\x7f\\x9b2J" in done.stdout
    assert not set(done.stdout) & {"\x1b", "\x07", "\x7f", "\u009b"}
    assert seen["version"] == "1\x1b]0;title\x07\x7f\u009b2J"
    # Nor by way of an error: this is not HTTP, but what is shown of it.
    with pages("headwater_serving \x1b[2J\n") as address:
        done = top(server, "--once", f"--metrics={address}")
    assert done.returncode == 1 and "\x1b" not in done.stderr and "\\x1b[2J" in done.stderr


def test_bytes_that_are_no_text_end_nothing(server):
    with pages(IDLE.replace('a\\"b,c}d', "\udcff")) as address:
        assert look(server, address)["version"] == "\ufffd"


@pytest.mark.parametrize("scheme", ["", "ipv4:", "dns:///"])
def test_the_metrics_are_looked_for_on_the_servers_host(scheme):
    with running("--listen_addresses=127.0.0.1:0") as server:
        server.address = scheme + (server.directory / "ready").read_text().strip()
        done = top(server, "--once", "--interval=100ms")  # the process that listens there is not this server
    assert "http://127.0.0.1:9464/metrics" in done.stderr or done.returncode == 0
