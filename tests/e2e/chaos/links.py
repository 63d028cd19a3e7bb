"""Links between trainers and the server that can be cut, halted and slowed down: through a proxy, or in network namespaces."""

import contextlib
import itertools
import os
import socket
import struct
import subprocess
import threading
import time

SLOW_BYTES_PER_S = 64 * 1024


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


class ProxyLink:
    """A TCP proxy in this process. Needs no rights."""

    kind = "proxy"

    def __init__(self, port: int):
        self.command: list[str] = []  # what the trainer's command begins with
        self.listen_address = f"127.0.0.1:{port}"
        self._target = ("127.0.0.1", port)
        self._lock = threading.Lock()
        self._open = threading.Event()
        self._open.set()
        self._slow = False
        self._sockets: set[socket.socket] = set()
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.01)  # there are no descriptors, say
                continue
            try:
                far = socket.create_connection(self._target)
            except OSError:  # the server is down
                near.close()
                continue
            # While no other thread knows of them: a pump, or a cut, may close both at any time after.
            for each in (near, far):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets |= {near, far}
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._open.wait()
                if self._slow:
                    time.sleep(len(data) / SLOW_BYTES_PER_S)
                sink.sendall(data)
        self._close((source, sink), reset=False)

    def _close(self, sockets, *, reset: bool) -> None:
        with self._lock:
            self._sockets -= set(sockets)
        for each in sockets:
            with contextlib.suppress(OSError):
                if reset:
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                else:
                    each.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(OSError):
                each.close()

    def cut(self, seconds: float) -> None:
        """Ends all connections; those that come within `seconds` get nowhere."""
        with self._lock:
            sockets = tuple(self._sockets)
        self._open.clear()
        self._close(sockets, reset=True)
        time.sleep(seconds)
        self._open.set()

    def halt(self, seconds: float) -> None:
        """Nothing goes either way."""
        self._open.clear()
        time.sleep(seconds)
        self._open.set()

    def slow(self, seconds: float) -> None:
        self._slow = True
        time.sleep(seconds)
        self._slow = False

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends accept(), which close() does not
        self._listener.close()
        self._open.set()
        with self._lock:
            sockets = tuple(self._sockets)
        self._close(sockets, reset=False)


_numbers = itertools.count()


class NamespaceLink:
    """A network namespace for the trainer, with a pair of virtual devices to the server's. Needs the right to make one."""

    kind = "namespaces"

    def __init__(self, port: int):
        number = next(_numbers)
        self._name = f"hwc{os.getpid()}x{number}"
        self._device = f"hwc{os.getpid() % 100000}v{number}"
        network = f"10.213.{os.getpid() % 250}.{4 * number}"
        prefix, base = network.rsplit(".", 1)
        server, trainer = f"{prefix}.{int(base) + 1}", f"{prefix}.{int(base) + 2}"
        self._run("ip", "netns", "add", self._name)
        try:
            self._run("ip", "link", "add", self._device, "type", "veth", "peer", "name", "eth0", "netns", self._name)
            self._run("ip", "addr", "add", f"{server}/30", "dev", self._device)
            self._run("ip", "link", "set", self._device, "up")
            self._inside("ip", "addr", "add", f"{trainer}/30", "dev", "eth0")
            self._inside("ip", "link", "set", "eth0", "up")
            self._inside("ip", "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError):
            self.close()
            raise
        self._trainer = trainer
        self.command = ["ip", "netns", "exec", self._name]
        self.listen_address = self.address = f"{server}:{port}"

    @staticmethod
    def _run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True)

    def _inside(self, *command: str) -> None:
        self._run("ip", "netns", "exec", self._name, *command)

    def cut(self, seconds: float) -> None:
        """Takes the device down and ends the trainer's connections, where the kernel can."""
        self._run("ip", "link", "set", self._device, "down")
        subprocess.run(["ip", "netns", "exec", self._name, "ss", "-K", "src", self._trainer], capture_output=True)
        time.sleep(seconds)
        self._run("ip", "link", "set", self._device, "up")

    def halt(self, seconds: float) -> None:
        """Packets are lost; connections stay, if they bear it."""
        self._inside("ip", "link", "set", "eth0", "down")
        time.sleep(seconds)
        self._inside("ip", "link", "set", "eth0", "up")

    def slow(self, seconds: float) -> None:
        shape = f"rate {8 * SLOW_BYTES_PER_S}bit burst 16kb latency 400ms"
        self._run("tc", "qdisc", "replace", "dev", self._device, "root", "tbf", *shape.split())
        time.sleep(seconds)
        self._run("tc", "qdisc", "del", "dev", self._device, "root")

    def close(self) -> None:
        subprocess.run(["ip", "netns", "del", self._name], capture_output=True)


def make_links(kind: str, count: int, port: int) -> list:
    """`kind`: proxy, namespaces, or auto, which is namespaces where they are allowed."""
    links: list = []
    if kind != "proxy":
        try:
            for _ in range(count):
                links.append(NamespaceLink(port))
            return links
        except (OSError, subprocess.CalledProcessError):
            for link in links:
                link.close()
            if kind == "namespaces":
                raise
    return [ProxyLink(port) for _ in range(count)]
