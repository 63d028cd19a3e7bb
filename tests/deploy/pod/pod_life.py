"""The life of a pod with native sidecars, as a kubelet leads it. Knows no podman: a `Runtime` starts, asks and ends the containers.

- Sidecars start one after the other, each when the startup probe of the one before it has passed. Then the containers start.
- A sidecar that ends, or whose startup or liveness probe fails, is restarted: at once, then after 10 s, 20 s, at most 300 s.
- When all containers have ended, or the pod is deleted, the pod ends. SIGTERM goes to the containers that still run, then to the
  sidecars in reverse order, each when the one before it has ended. SIGKILL follows when the pod's grace period is over, but never
  less than 2 s after SIGTERM. Nothing is started or asked any more then.
- The pod's result is that of its containers; sidecars count for nothing.

As Kubernetes' page "Sidecar Containers" describes it, and as its kubelet does it (computePodActions, terminationOrdering).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

from pod_manifest import Pod, Probe, Sidecar

# A container's time between SIGTERM and SIGKILL even if nothing is left of the grace period.
LEAST_GRACE_S = 2.0
# The wait before a sidecar is restarted: none at first, then this, doubling; none again after it has lived twice the most.
FIRST_BACKOFF_S = 10.0
MOST_BACKOFF_S = 300.0


class Runtime(Protocol):
    """The runtime of the containers, by name."""

    async def start(self, name: str) -> None:
        """Starts a container that does not run."""

    async def wait(self, name: str) -> int:
        """Waits until the container ends, or has ended since it was last started: its exit status."""

    async def execute(self, name: str, command: tuple[str, ...]) -> tuple[int, str]:
        """Runs a command in the container: its exit status and output. Ends the command when it is cancelled."""

    async def signal(self, name: str, signal: str) -> None:
        """Sends SIGTERM ("TERM") or SIGKILL ("KILL"); nothing happens if the container does not run."""


# Called with an event's name and details.
Record = Callable[..., None]


class Backoff:
    """The wait before the restart of a sidecar that has ended."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def after(self, lived_s: float) -> float:
        """Seconds to wait after it has ended, `lived_s` after it was last started."""
        if lived_s > 2 * MOST_BACKOFF_S:
            self._next_s = 0.0
        wait_s, self._next_s = self._next_s, min(max(2 * self._next_s, FIRST_BACKOFF_S), MOST_BACKOFF_S)
        return wait_s


class PodLife:
    """One pod, once. Use in one event loop."""

    def __init__(self, pod: Pod, runtime: Runtime, record: Record):
        self._pod = pod
        self._runtime = runtime
        self._record = record
        self._ending = asyncio.Event()
        self._lives: dict[str, asyncio.Task[int]] = {}  # each container's last one, which is its exit status
        self._tasks: asyncio.TaskGroup

    def delete(self) -> None:
        """Has the pod end now."""
        self._ending.set()

    async def run(self) -> bool:
        """Leads the pod to its end: whether all its containers were started and ended with status 0.

        Raises:
            ExceptionGroup: of what the runtime raised. Containers may still run then.
        """
        async with asyncio.TaskGroup() as self._tasks:
            keepers = []
            for sidecar in self._pod.sidecars:
                started = asyncio.Event()
                keepers.append(self._tasks.create_task(self._keep(sidecar, started)))
                await self._until(started.wait())
            if not self._ending.is_set():
                await self._until(asyncio.wait([await self._start(name) for name in self._pod.containers]))
            self._record("ending", grace_period_s=self._pod.grace_period_s)
            deadline = self._now() + self._pod.grace_period_s
            self._ending.set()
            await asyncio.gather(*keepers, *(self._end(name, deadline) for name in self._pod.containers))
            for sidecar in reversed(self._pod.sidecars):
                await self._end(sidecar.name, deadline)
        statuses = [self._lives[name].result() for name in self._pod.containers if name in self._lives]
        succeeded = statuses == [0] * len(self._pod.containers)
        self._record("ended", phase="Succeeded" if succeeded else "Failed")
        return succeeded

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    async def _until(self, *others: Awaitable[Any]) -> None:
        """Waits until one of them is done or the pod must end. Tasks continue; other awaitables are given up."""
        tasks = {asyncio.ensure_future(other) for other in (*others, self._ending.wait())}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks.difference(others):
                task.cancel()

    async def _start(self, name: str) -> asyncio.Task[int]:
        await self._runtime.start(name)
        self._record("container_started", container=name)
        self._lives[name] = self._tasks.create_task(self._live(name))
        return self._lives[name]

    async def _live(self, name: str) -> int:
        status = await self._runtime.wait(name)
        self._record("container_ended", container=name, status=status)
        return status

    async def _end(self, name: str, deadline: float) -> None:
        """Ends a container that may run, with SIGKILL when the time is over."""
        life = self._lives.get(name)
        if life is None or life.done():
            return
        self._record("terminating", container=name)
        await self._runtime.signal(name, "TERM")
        await asyncio.wait([life], timeout=max(deadline - self._now(), LEAST_GRACE_S))
        if not life.done():
            self._record("killing", container=name)
            await self._runtime.signal(name, "KILL")
            await asyncio.wait([life])

    # ---- sidecars -----------------------------------------------------------------------------------------------------

    async def _keep(self, sidecar: Sidecar, started: asyncio.Event) -> None:
        """Has the sidecar run until the pod ends; it runs then, or has just ended."""
        backoff = Backoff()
        while not self._ending.is_set():
            began = self._now()
            life = await self._start(sidecar.name)
            asking = self._tasks.create_task(self._ask_probes(sidecar, started))
            await self._until(life, asking)
            if not self._ending.is_set():
                await self._end(sidecar.name, self._now() + self._pod.grace_period_s)
            asking.cancel()
            if not self._ending.is_set():
                wait_s = backoff.after(self._now() - began)
                self._record("restarting", container=sidecar.name, wait_s=wait_s)
                await self._until(asyncio.sleep(wait_s))

    async def _ask_probes(self, sidecar: Sidecar, started: asyncio.Event) -> None:
        """Returns when a probe has failed after which the sidecar must be restarted."""
        if sidecar.startup is not None:
            async for passed in self._verdicts(sidecar.name, "startup", sidecar.startup):
                if not passed:
                    return
                break
        started.set()
        # Nothing selects the pod by its readiness, which is only reported.
        readiness = self._tasks.create_task(self._follow(sidecar.name, "readiness", sidecar.readiness))
        try:
            await self._follow(sidecar.name, "liveness", sidecar.liveness, until_failed=True)
        finally:
            readiness.cancel()

    async def _follow(self, name: str, kind: str, probe: Probe | None, *, until_failed: bool = False) -> None:
        if probe is None:
            await asyncio.get_running_loop().create_future()  # until it is cancelled
            return
        async for passed in self._verdicts(name, kind, probe):
            if until_failed and not passed:
                return

    async def _verdicts(self, name: str, kind: str, probe: Probe) -> AsyncIterator[bool]:
        """Whether the probe passes or fails, each time that it does so as often in a row as it must to count."""
        verdict, counts = None, {True: 0, False: 0}
        await asyncio.sleep(probe.initial_delay_s)
        while True:
            asked = self._now()
            passed, output = await self._ask(name, probe)
            counts = {passed: counts[passed] + 1, not passed: 0}
            if counts[passed] >= (probe.success_threshold if passed else probe.failure_threshold):
                if passed != verdict:
                    verdict = passed
                    self._record("probe_passed" if passed else "probe_failed", container=name, probe=kind, output=output)
                yield passed
            await asyncio.sleep(max(asked + probe.period_s - self._now(), 0))

    async def _ask(self, name: str, probe: Probe) -> tuple[bool, str]:
        try:
            # Not wait_for(), whose cancellation is lost if the answer comes at the same moment.
            async with asyncio.timeout(probe.timeout_s):
                status, output = await self._runtime.execute(name, probe.command)
        except TimeoutError:
            return False, f"no answer within {probe.timeout_s} s"
        return status == 0, output
