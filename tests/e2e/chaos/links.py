"""Links between trainers and the server that can be cut, halted and slowed down: through a proxy, or in network namespaces."""

import asyncio
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
    """A TCP proxy in a thread of this process. Needs no rights."""

    kind = "proxy"

    def __init__(self, port: int):
        self.command: list[str] = []  # what the trainer's command begins with
        self.listen_address = f"127.0.0.1:{port}"
        self._port = port
        self._halted = self._slow = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._connect, "127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:  # the server is down
            writer.close()
            return
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        self._writers.add(sink)
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                while self._halted:
                    await asyncio.sleep(0.005)
                if self._slow:
                    await asyncio.sleep(len(data) / SLOW_BYTES_PER_S)
                sink.write(data)
                await sink.drain()
        self._writers.discard(sink)
        sink.close()  # which ends the other direction, too

    def _reset(self) -> None:
        for writer in tuple(self._writers):
            with contextlib.suppress(OSError):  # it has ended by itself
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    def cut(self, seconds: float) -> None:
        """Ends all connections; those that come within `seconds` get nowhere."""
        self._halted = True
        self._loop.call_soon_threadsafe(self._reset)
        self.halt(seconds)

    def halt(self, seconds: float) -> None:
        """Nothing goes either way."""
        self._halted = True
        time.sleep(seconds)
        self._halted = False

    def slow(self, seconds: float) -> None:
        self._slow = True
        time.sleep(seconds)
        self._slow = False

    def close(self) -> None:
        for end in (self._server.close, self._reset, self._loop.stop):
            self._loop.call_soon_threadsafe(end)


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
