#!/usr/bin/env python3
"""One point of the study: trains for some steps, and prints a line of JSON with times, memory and losses. Started by `run`."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import runs
import torch
import torch.distributed as dist
import trainers
from points import Point

import headwater
import headwater.local

# Imported before the process knows its point, for which it may have to wait. None takes a GPU's memory.
for name in ("transformers.models.llama.modeling_llama", "headwater.transformers"):
    with contextlib.suppress(ModuleNotFoundError):  # a point without a body needs no transformers
        importlib.import_module(name)

SHAPES = {  # hidden size, layers, heads, heads of keys and values, size of the feed-forward part
    "1b": (2048, 16, 32, 8, 8192),
    "3b": (3072, 28, 24, 8, 8192),
    "tiny": (32, 2, 4, 2, 64),
}
DITHERED = 2.0**-12
STEPS = 4  # that are timed at most


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


@dataclasses.dataclass
class Side:
    """A point's model: the mean loss of a micro-batch's next tokens, as a function of its ids, and what the optimizer has."""

    loss: Callable[[torch.Tensor], torch.Tensor]
    parameters: list[torch.Tensor]
    heads: list[Any] = dataclasses.field(default_factory=list)  # whose steps are taken beside the optimizer's
    attached: Any = None  # a head in the model, whose steps a TrainingLoop ties to the optimizer's


def rows_alone(point: Point, device: str, client: Any) -> Side:
    """No body: a micro-batch is its hidden states, whose gradient is computed as well."""
    hidden_size = SHAPES[point.model][0]
    torch.manual_seed(1)
    hidden = torch.randn(point.rows, hidden_size, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(point.vocab, hidden_size, device=device, dtype=torch.bfloat16).normal_(0, 0.02)
    head = trainers.RemoteHead(client, "study", weight) if client else trainers.LocalHead(point.way, weight)
    return Side(lambda ids: head(hidden, ids.flatten()), [hidden, *head.parameters()], [head])


def medusa(point: Point, model: Any, device: str, client: Any) -> Side:
    """The model's last layer and extra heads, of which number k predicts the token k + 1 places later.

    Each has a last layer of its own, at first the model's. All last layers are the trainer's, or heads of one server.
    """
    weight, model.lm_head = model.lm_head.weight.detach(), None
    layers = [
        # A sum of losses has the gradient 1 in each: it is declared, so that nothing waits for backward.
        trainers.RemoteHead(client, f"study-{number}", weight, shift=number + 1, loss_scale=1.0)
        if client
        else trainers.LocalHead(point.way, weight.clone(), shift=number + 1)
        for number in range(1 + point.extra_heads)
    ]
    blocks = [torch.nn.Identity(), *(trainers.Residual(weight.shape[1]) for _ in range(point.extra_heads))]
    heads = trainers.ManyHeads(blocks, layers).to(device, torch.bfloat16)
    parameters = [*model.model.parameters(), *heads.parameters()]
    return Side(lambda ids: heads(model.model(input_ids=ids).last_hidden_state, ids), parameters, layers)


def remote(point: Point, model: Any, client: Any) -> Side:
    """The head is a server's, put into the model as docs/guides/transformers.md shows."""
    import headwater.transformers

    if point.way == "liger_body_headwater":
        apply_liger(point.way, model)
    if point.way == "headwater_dithered":
        optimizer = trainers.server_optimizer()
        head = headwater.torch.attach(client, "study", model.lm_head, model=model, optimizer=optimizer, if_exists="replace")
        loss = headwater.torch.CrossEntropyLoss(head, shift=1, gradient_resolution=DITHERED)
        model.lm_head.requires_grad_(False)
        return Side(lambda ids: loss(model.model(input_ids=ids).last_hidden_state, ids), trained(model), attached=head)
    optimizer = "torch" if point.way == "headwater_trainer" else trainers.server_optimizer()
    config = headwater.transformers.HeadwaterConfig(client=client, head="study", if_exists="replace", optimizer=optimizer)
    head = headwater.transformers.attach_remote_head(model, config).head
    return Side(lambda ids: model(input_ids=ids, labels=ids).loss, trained(model), attached=head)


def in_process(point: Point, model: Any) -> Side:
    """The head's weight, its gradient and its optimizer state are the trainer's."""
    if point.way == "eager" or point.way.startswith("liger"):
        if point.way != "eager":
            apply_liger(point.way, model)
        return Side(lambda ids: model(input_ids=ids, labels=ids).loss, trained(model))
    of_rows = trainers.loss_of_rows(point.way)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
        return of_rows(hidden.flatten(0, 1), model.lm_head.weight, ids[:, 1:].flatten())

    return Side(loss, trained(model))


def trained(model: Any) -> list[torch.Tensor]:
    """The parameters that the trainer's optimizer has."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@contextlib.contextmanager
def watched(cards: Iterable[int]) -> Iterator[dict[int, int]]:
    """The most bytes that all processes together take of each card, looked at every 5 ms."""
    peaks, over = dict.fromkeys(cards, 0), threading.Event()

    def watch() -> None:
        while not over.wait(0.005):
            for card in peaks:
                free, total = torch.cuda.mem_get_info(card)
                peaks[card] = max(peaks[card], total - free)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        over.set()
        thread.join()


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


@contextlib.contextmanager
def traced(folder: str, on_gpu: bool) -> Iterator[None]:
    """Writes a profile of what is done, and a snapshot of the allocator's history, into the folder."""
    activities = [torch.profiler.ProfilerActivity.CPU] + ([torch.profiler.ProfilerActivity.CUDA] if on_gpu else [])
    if on_gpu:
        torch.cuda.memory._record_memory_history(max_entries=200_000)
    with torch.profiler.profile(activities=activities) as profiler:
        yield
    profiler.export_chrome_trace(os.path.join(folder, "step.pt.trace.json.gz"))
    if on_gpu:
        torch.cuda.memory._dump_snapshot(os.path.join(folder, "memory.pickle"))


def connected(address: str, device: str) -> Any:
    """A client of the server at an address, or of one that this process starts on its device."""
    return headwater.connect(address) if address else headwater.local.connect(engine="cpu" if device == "cpu" else "cuda")


def make_side(point: Point, device: str, client: Any) -> Side:
    """The point's model, sharded over several ranks, or where the CPU has the body."""
    if not point.body:
        return rows_alone(point, device, client)
    model = make_model(point, "cpu" if point.offload else device)
    if point.extra_heads:
        side = medusa(point, model, device, client)
    else:
        side = remote(point, model, client) if client else in_process(point, model)
    if point.sharded:
        shard(point, model, device)
        side.parameters = trained(model)
    return side


def measure(rank: int, point: Point, options: Any, client: Any, device: str) -> dict[str, Any]:
    """The figures of a point; every rank calls it."""
    on_gpu = device != "cpu"
    if point.cap_gib and on_gpu:
        # Memory of the server and of both contexts comes off the trainer's part.
        free, total = torch.cuda.mem_get_info()
        rest = point.cap_gib * 2**30 - (total - free) - options.server_mib * 2**20
        torch.cuda.set_per_process_memory_fraction(max(rest, 1) / total)
    side = make_side(point, device, client)
    optimizer = trainers.make_optimizer(side.parameters, "cpu" if point.offload else device)
    loop = None
    if side.attached:
        # FSDP averages the body's gradient over the ranks, whose losses are means of their own rows.
        loop = headwater.torch.TrainingLoop(side.attached, optimizer, gradient_factor=1 / point.ranks)
        loop.resume()
    generator = torch.Generator().manual_seed(2 + rank)

    def step() -> float:
        total = 0.0
        for _ in range(point.accumulation):
            ids = torch.randint(point.vocab, (point.batch, point.context), generator=generator).to(device)
            loss = side.loss(ids) / point.accumulation
            if loop:
                loop.backward(loss)
            else:
                loss.backward()
            total += float(loss.detach())
        if loop:
            loop.step()
        else:
            trainers.update(optimizer, side.heads, point.accumulation, steps=point.body)
        return total

    # A look at a card takes a context there: a rank looks at its own.
    own = [rank] if point.ranks > 1 else range(torch.cuda.device_count())
    # Ranks must agree on the number of steps, so no clock ends theirs. The first step compiles and allocates.
    least = STEPS if point.ranks > 1 else 1
    with watched(own if on_gpu else ()) as peaks:
        result = trainers.timed(step, device, warm_up=1, least=least, most=STEPS, seconds=options.seconds)
    result["tokens_per_second"] = 1000 * point.rows * point.ranks * point.accumulation / result["step_ms"]
    result["server_planned_mib"] = 0.0
    if client:
        result["server_planned_mib"] = sum(card.memory_planned_bytes for card in client.server_info().devices) / trainers.MIB
    every: list[Any] = [(peaks, result.pop("peak_mib"))]
    if point.ranks > 1:
        seen, every = every[0], [None] * point.ranks
        dist.all_gather_object(every, seen)
    if on_gpu:
        result["trainer_peak_mib"] = max(peak for _, peak in every)
        result["cards_peak_mib"] = {str(card): peak / trainers.MIB for cards, _ in every for card, peak in cards.items()}
    if options.trace:
        with traced(options.trace, on_gpu) if rank == 0 else contextlib.nullcontext():
            step()
    return result


def run_rank(rank: int, point: Point, options: Any) -> None:
    """One rank's part. Rank 0 prints the result, and each rank that runs out of memory says so and ends all."""
    device = trainers.use_device(options.device, rank)
    try:
        with connected(options.address, device) if "headwater" in point.way else contextlib.nullcontext() as client:
            result = measure(rank, point, options, client, device)
    except torch.OutOfMemoryError as error:
        result = {"out_of_memory": str(error).splitlines()[0]}
    if rank == 0 or "out_of_memory" in result:
        runs.say(result)
    if point.ranks > 1 and "out_of_memory" in result:
        os._exit(1)  # the other rank waits for this one: it is ended with it


def main() -> None:
    options = runs.trainer_options()
    point = Point(**options.point)
    if point.sharded:
        trainers.run_ranks(run_rank, point.ranks, options.device, point, options)
    else:
        run_rank(0, point, options)


if __name__ == "__main__":
    main()
