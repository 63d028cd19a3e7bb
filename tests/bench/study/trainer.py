#!/usr/bin/env python3
"""One point of the study: trains for some steps, and prints a line of JSON with times, memory and losses. Started by `run`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from points import Point

LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY = 1e-4, (0.9, 0.95), 1e-8, 0.01
SHAPES = {  # hidden size, layers, heads, heads of keys and values, size of the feed-forward part
    "1b": (2048, 16, 32, 8, 8192),
    "3b": (3072, 28, 24, 8, 8192),
    "tiny": (32, 2, 4, 2, 64),
}
DITHERED = 2.0**-12
MIB = 2.0**20


def make_model(point: Point, device: str) -> Any:
    """A Llama of random weights in bf16, with a last layer of its own."""
    import transformers

    hidden_size, layers, heads, kv_heads, feed_forward = SHAPES[point.model]
    config = transformers.LlamaConfig(
        vocab_size=point.vocab, max_position_embeddings=max(point.context, 2048), tie_word_embeddings=False, use_cache=False,
        hidden_size=hidden_size, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        intermediate_size=feed_forward,
    )  # fmt: skip
    torch.manual_seed(1)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    if point.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return model


def apply_liger(way: str, model: Any) -> None:
    """Liger's kernels, as its own function puts them into a model."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    body = way in ("liger_all", "liger_body_headwater")
    apply_liger_kernel_to_llama(
        rope=body or way == "liger_rope",
        swiglu=body or way == "liger_swiglu",
        rms_norm=body or way == "liger_rms",
        cross_entropy=False,
        fused_linear_cross_entropy=way in ("liger", "liger_all"),
        model=model,
    )


def rows_loss(way: str, device: str) -> Any:
    """A function (hidden [N, H], weight [V, H], targets [N]) -> mean loss, for the ways that are no model's."""

    def eager(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), targets)

    if way == "eager":
        return eager
    if way == "compile":
        return torch.compile(eager, dynamic=False) if device != "cpu" else eager
    if way == "liger":
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss()
        return lambda hidden, weight, targets: loss(weight, hidden, targets)
    if way == "cce":
        from cut_cross_entropy import linear_cross_entropy

        return linear_cross_entropy
    if way == "trl":
        from trl.kernels import ChunkedLogProbFunction

        def chunked(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return -ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 16384, None, 1.0, ())[0].mean()

        return chunked
    raise ValueError(f"{way} has no function of rows")


class InProcess:
    """The head's weight, its gradient and its optimizer state are the trainer's."""

    _client: Any = None  # of a server

    def __init__(self, point: Point, model: Any, device: str):
        self.model = model
        self._of_rows = None
        if point.way.startswith("liger"):
            apply_liger(point.way, model)
        elif point.way != "eager":
            self._of_rows = rows_loss(point.way, device)
        self.parameters = list(model.parameters())

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        """The mean loss of a micro-batch's next tokens."""
        if self._of_rows is None:
            return self.model(input_ids=ids, labels=ids).loss
        hidden = self.model.model(input_ids=ids).last_hidden_state[:, :-1]
        return self._of_rows(hidden.flatten(0, 1), self.model.lm_head.weight, ids[:, 1:].flatten())

    def start(self, optimizer: torch.optim.Optimizer) -> None:
        """Ties the steps of a head on a server to the optimizer's."""

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def planned_bytes(self) -> int:
        """Memory that a server plans for its heads."""
        return 0 if self._client is None else sum(device.memory_planned_bytes for device in self._client.server_info().devices)

    def close(self) -> None:
        """Leaves the server."""
        if self._client is not None:
            self._client.close()


def connected(address: str, device: str) -> Any:
    """A client of the server at an address, or of one that this process starts on its device."""
    import headwater.local

    return headwater.connect(address) if address else headwater.local.connect(engine="cpu" if device == "cpu" else "cuda")


class Remote(InProcess):
    """The head is a server's, put into the model as docs/guides/transformers.md shows."""

    def __init__(self, point: Point, model: Any, device: str, address: str):
        import headwater.torch
        import headwater.transformers

        if point.way == "liger_body_headwater":
            apply_liger(point.way, model)
        self.model = model
        self._ranks = point.ranks
        self._client = connected(address, device)
        owned_by_trainer = point.way == "headwater_trainer"
        optimizer = headwater.AdamW(beta1=BETAS[0], beta2=BETAS[1], epsilon=EPSILON, weight_decay=WEIGHT_DECAY)
        self._loss = None
        if point.way == "headwater_dithered":
            self._head = headwater.torch.attach(
                self._client, "study", model.lm_head, model=model, optimizer=optimizer, if_exists="replace"
            )
            self._loss = headwater.torch.CrossEntropyLoss(self._head, shift=1, gradient_resolution=DITHERED)
            model.lm_head.requires_grad_(False)
        else:
            config = headwater.transformers.HeadwaterConfig(
                client=self._client, head="study", if_exists="replace", optimizer="torch" if owned_by_trainer else optimizer
            )
            self._head = headwater.transformers.attach_remote_head(model, config).head
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._loop: Any = None

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        if self._loss is not None:
            return self._loss(self.model.model(input_ids=ids).last_hidden_state, ids)
        return self.model(input_ids=ids, labels=ids).loss

    def start(self, optimizer: torch.optim.Optimizer) -> None:
        """Ties the head's steps to the optimizer's."""
        import headwater.torch

        # FSDP averages the body's gradient over the ranks, whose losses are means of their own rows.
        self._loop = headwater.torch.TrainingLoop(self._head, optimizer, gradient_factor=1 / self._ranks)
        self._loop.resume()

    def backward(self, loss: torch.Tensor) -> None:
        self._loop.backward(loss)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self._loop.step()


class Residual(torch.nn.Module):
    """The block before the last layer of an extra head: hidden states plus a layer of them, at first nothing."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.layer = torch.nn.Linear(hidden_size, hidden_size)
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + F.silu(self.layer(hidden))


class Medusa(InProcess):
    """The model's last layer and extra heads, of which number k predicts the token k + 1 places later. The loss is their sum.

    Each has a last layer of its own, at first the model's. All last layers are the trainer's, or heads of one server.
    """

    def __init__(self, point: Point, model: Any, device: str, address: str):
        self._body = model.model
        weight, model.lm_head = model.lm_head.weight.detach(), None
        extra = [Residual(weight.shape[1]) for _ in range(point.extra_heads)]
        self._blocks = torch.nn.ModuleList([torch.nn.Identity(), *extra]).to(device, torch.bfloat16)
        self.parameters = [*self._body.parameters(), *self._blocks.parameters()]
        self._heads = []
        if address:
            import headwater.torch

            self._client = connected(address, device)
            optimizer = headwater.AdamW(beta1=BETAS[0], beta2=BETAS[1], epsilon=EPSILON, weight_decay=WEIGHT_DECAY)
            for number in range(len(self._blocks)):
                head = self._client.create_head(f"study-{number}", weight.cpu(), optimizer=optimizer, staging_slots=0)
                self._heads.append(head)
            # A sum of losses has the gradient 1 in each: it is declared, so that nothing waits for backward.
            self._losses = [
                headwater.torch.CrossEntropyLoss(head, shift=number + 1, loss_scale=1.0) for number, head in enumerate(self._heads)
            ]
        else:
            of_rows = rows_loss(point.way, device)
            layers = [torch.nn.Parameter(weight.clone()) for _ in self._blocks]
            self.parameters += layers

            def shifted(number: int) -> Any:
                shift, layer = number + 1, layers[number]
                return lambda hidden, ids: of_rows(hidden[:, :-shift].flatten(0, 1), layer, ids[:, shift:].flatten())

            self._losses = [shifted(number) for number in range(len(layers))]

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self._body(input_ids=ids).last_hidden_state
        losses = [loss(block(hidden), ids) for loss, block in zip(self._losses, self._blocks, strict=True)]
        return torch.stack([loss.float() for loss in losses]).sum()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        futures = [head.apply_optimizer_step_future(learning_rate=LEARNING_RATE, expected_micro_batches=1) for head in self._heads]
        for future in futures:
            future.result()
        super().step(optimizer)


class Rows(InProcess):
    """No body: a micro-batch is its hidden states, whose gradient is computed as well."""

    def __init__(self, point: Point, device: str, address: str):
        hidden_size = SHAPES[point.model][0]
        torch.manual_seed(1)
        self._hidden = torch.randn(point.rows, hidden_size, device=device, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(point.vocab, hidden_size, device=device, dtype=torch.bfloat16).normal_(0, 0.02)
        if address or point.way == "headwater_local":
            import headwater.torch

            self._client = connected(address, device)
            self._head = self._client.create_head("study", weight.cpu(), optimizer=headwater.AdamW(), if_exists="replace")
            self._loss = headwater.torch.CrossEntropyLoss(self._head)
            self.parameters = [self._hidden]
        else:
            self._weight = weight.requires_grad_()
            self._of_rows = rows_loss(point.way, device)
            self.parameters = [self._hidden, self._weight]

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        if self._client is not None:
            return self._loss(self._hidden, ids.flatten())
        return self._of_rows(self._hidden, self._weight, ids.flatten())

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._client is not None:
            self._head.apply_optimizer_step(learning_rate=LEARNING_RATE, expected_micro_batches=self._loss.micro_batches)
        optimizer.zero_grad(set_to_none=True)


class CardMemory(threading.Thread):
    """The most that all processes together take of each card, looked at every 5 ms."""

    def __init__(self, devices: Iterable[int]):
        super().__init__(daemon=True)
        self.peaks = dict.fromkeys(devices, 0)
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.005):
            for device in self.peaks:
                free, total = torch.cuda.mem_get_info(device)
                self.peaks[device] = max(self.peaks[device], total - free)

    def end(self) -> dict[int, int]:
        """Ends the thread; bytes by device."""
        self._over.set()
        self.join()
        return self.peaks


def shard(point: Point, model: Any, device: str) -> None:
    """FSDP2 over all ranks; a point's offload has parameters, gradients and optimizer state on the CPU."""
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard

    policy = {"offload_policy": CPUOffloadPolicy()} if point.offload else {}
    for unit in (*model.model.layers, model):
        fully_shard(unit, **policy)
    if device == "cpu":
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.set_force_sum_reduction_for_comms(True)  # gloo knows no other


def traced(folder: str | None, on_gpu: bool) -> Any:
    """A profiler of one step, and a snapshot of the allocator's history, written to the folder; or nothing."""
    if folder is None:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def trace():
        activities = [torch.profiler.ProfilerActivity.CPU] + ([torch.profiler.ProfilerActivity.CUDA] if on_gpu else [])
        if on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=200_000)
        with torch.profiler.profile(activities=activities) as profiler:
            yield
        profiler.export_chrome_trace(os.path.join(folder, "step.pt.trace.json.gz"))
        if on_gpu:
            torch.cuda.memory._dump_snapshot(os.path.join(folder, "memory.pickle"))

    return trace()


def measure(point: Point, options: argparse.Namespace, rank: int) -> dict[str, Any]:
    """The figures of a point; every rank calls it."""
    on_gpu = options.device != "cpu"
    device = f"cuda:{rank}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
    if point.cap_gib and on_gpu:
        # Memory of the server and of both contexts comes off the trainer's part.
        free, total = torch.cuda.mem_get_info()
        rest = point.cap_gib * 2**30 - (total - free) - options.server_mib * 2**20
        torch.cuda.set_per_process_memory_fraction(max(rest, 1) / total)
    if not point.body:
        side: Any = Rows(point, device, options.address)
    else:
        model = make_model(point, "cpu" if point.offload else device)
        if point.extra_heads:
            side = Medusa(point, model, device, options.address)
        elif "headwater" in point.way:
            side = Remote(point, model, device, options.address)
        else:
            side = InProcess(point, model, device)
        if point.sharded:
            shard(point, model, device)
            side.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fused = {"fused": True} if on_gpu and not point.offload else {}
    optimizer = torch.optim.AdamW(side.parameters, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, **fused)
    side.start(optimizer)
    generator = torch.Generator().manual_seed(2 + rank)

    def step() -> float:
        total = 0.0
        for _ in range(point.accumulation):
            ids = torch.randint(point.vocab, (point.batch, point.context), generator=generator).to(device)
            loss = side.loss(ids) / point.accumulation
            side.backward(loss)
            total += float(loss.detach())
        side.step(optimizer)
        if on_gpu:
            torch.cuda.synchronize()
        return total

    losses, times = [], []
    # A look at a card takes a context there: a rank looks at its own.
    card = CardMemory([rank] if point.ranks > 1 else range(torch.cuda.device_count())) if on_gpu else None
    if card:
        card.start()
    # Ranks must agree on the number of steps, so no clock ends theirs.
    while len(times) < options.steps and (point.ranks > 1 or sum(times) < options.seconds):
        if on_gpu and len(losses) == 1:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        losses.append(step())
        # The first step compiles and allocates.
        if len(losses) > 1:
            times.append(time.perf_counter() - start)
    result = {
        "step_ms": 1000 * statistics.median(times),
        "spread": (max(times) - min(times)) / statistics.median(times),
        "tokens_per_second": point.rows * point.ranks * point.accumulation / statistics.median(times),
        "losses": losses,
        "server_planned_mib": side.planned_bytes() / MIB,
    }
    if card:
        seen = card.end(), torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        every: list[Any] = [seen]
        if point.ranks > 1:
            every = [None] * point.ranks
            dist.all_gather_object(every, seen)
        peaks = {number: peak for own, _, _ in every for number, peak in own.items()}
        result["trainer_peak_mib"] = max(allocated for _, allocated, _ in every) / MIB
        result["trainer_reserved_mib"] = max(reserved for _, _, reserved in every) / MIB
        result["cards_peak_mib"] = {str(number): peak / MIB for number, peak in peaks.items()}
    with traced(options.trace if rank == 0 else None, on_gpu):
        if options.trace:
            step()
    side.close()
    return result


def run_rank(rank: int, point: Point, options: argparse.Namespace, folder: str) -> None:
    """One rank's part. Rank 0 prints the result, and each rank that runs out of memory says so and ends all."""
    if point.sharded:
        backend = "gloo" if options.device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, init_method=f"file://{folder}/ranks", rank=rank, world_size=point.ranks)
    try:
        result = measure(point, options, rank)
    except torch.OutOfMemoryError as error:
        result = {"out_of_memory": str(error).splitlines()[0]}
    if rank == 0 or "out_of_memory" in result:
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
    if point.ranks > 1 and "out_of_memory" in result:
        os._exit(1)  # the other rank waits for this one: it is ended with it
    if point.sharded:
        dist.destroy_process_group()


def arguments_from_stdin() -> list[str]:
    """Imports what points need, none of which takes a GPU's memory; then reads the arguments, a list in JSON."""
    for name in ("headwater.torch", "transformers.models.llama.modeling_llama", "headwater.transformers"):
        with contextlib.suppress(ModuleNotFoundError):  # a point without a body needs no transformers
            importlib.import_module(name)
    text = sys.stdin.read()
    return json.loads(text) if text else sys.exit()  # no point is left


def main() -> None:
    """Prints the result. With --wait alone the arguments come from standard input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--point", required=True, help="JSON of a Point")
    parser.add_argument("--address", default="", help="of the server; empty with headwater_local, and without a head on a server")
    parser.add_argument("--server-mib", type=float, default=0, help="of the trainer's card that is a server's, with cap_gib")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=4, help="that are timed")
    parser.add_argument("--seconds", type=float, default=8, help="after which no step begins")
    parser.add_argument("--trace", help="folder for a profiler trace and a memory snapshot of one step more")
    options = parser.parse_args(arguments_from_stdin() if sys.argv[1:] == ["--wait"] else None)
    point = Point(**json.loads(options.point))
    with tempfile.TemporaryDirectory(prefix="hw-") as folder:
        if point.ranks == 1:
            run_rank(0, point, options, folder)
        else:
            # Nothing has touched a GPU yet, so the ranks need not import all again.
            torch.multiprocessing.start_processes(run_rank, (point, options, folder), nprocs=point.ranks, start_method="fork")


if __name__ == "__main__":
    main()
