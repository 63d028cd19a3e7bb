#!/usr/bin/env python3
"""What others take on a GPU for the benchmark's shapes: time against the bare products, and peak memory beyond the inputs.

    tests/bench/engine/peers.py [--cases NAME,...] [--seconds S] [--output FILE.csv] [--commit NAME]

bf16 inputs; loss, grad_hidden and grad_weight are computed. Peers: eager PyTorch and torch.compile with fp32 logits, Liger's Triton
kernels and QuACK's. Those whose package is not there are named and left out.

Protocol: each peer's blocks alternate with blocks of the bare products (torch.mm, bf16, grad_weight in fp32) at full load; the
ratio is the median over blocks of peer / mean of the neighbouring products' blocks. Peers write a bf16 grad_weight that adds
nothing, which is less work than the engine does.
"""

import argparse
import gc
import importlib
import importlib.util
import pathlib
import statistics
import sys
import time

import torch
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "common"))
import figures

VOCAB = 128256
# Name: (rows, hidden size, teacher's hidden size or 0).
CASES = {
    "ce_n4096_h4096_v128256": (4096, 4096, 0),
    "ce_n8192_h4096_v128256": (8192, 4096, 0),
    "ce_n1024_h4096_v128256": (1024, 4096, 0),
    "ce_n8192_h2048_v128256": (8192, 2048, 0),
    "jsd_n4096_hs4096_ht4096_v128256": (4096, 4096, 4096),
    "jsd_n8192_hs2048_ht4096_v128256": (8192, 2048, 4096),
}


def eager_cross_entropy(hidden, weight, targets):
    """The textbook's loss: logits in fp32."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")


def eager_divergence(student, teacher):
    """The generalized JSD at beta 1/2, from log-softmax."""
    (hidden, weight), (teacher_hidden, teacher_weight) = student, teacher
    log_q = F.log_softmax(F.linear(hidden, weight).float(), dim=-1)
    with torch.no_grad():
        log_p = F.log_softmax(F.linear(teacher_hidden, teacher_weight).float(), dim=-1)
    log_m = torch.logaddexp(log_p, log_q) - 0.6931471805599453
    forward = F.kl_div(log_m, log_p, reduction="sum", log_target=True)
    reverse = F.kl_div(log_m, log_q, reduction="sum", log_target=True)
    return 0.5 * forward + 0.5 * reverse


def member(package, module, name):
    """What a module of a package calls `name`, or None, saying why."""
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        print(f"{package} is there, but has no {name}: {error}")
        return None


def compiled(function):
    """For these shapes only, as a training loop would have it."""
    torch.compiler.reset()
    return torch.compile(function, dynamic=False)


def cross_entropy_peers(hidden, weight, targets, options):
    """Name: a function that returns the loss, or None for what is not there."""
    compiled_loss = compiled(eager_cross_entropy)
    peers = {
        "torch_eager": lambda: eager_cross_entropy(hidden, weight, targets),
        "torch_compile": lambda: compiled_loss(hidden, weight, targets),
        "liger": None,
        "liger_fp32": None,
        "quack": None,
    }
    liger = member("liger_kernel", "liger_kernel.transformers", "LigerFusedLinearCrossEntropyLoss")
    if liger is not None:
        loss, loss_fp32 = liger(reduction="sum"), liger(reduction="sum", accum_dtype=torch.float32)
        peers["liger"] = lambda: loss(weight, hidden, targets)
        peers["liger_fp32"] = lambda: loss_fp32(weight, hidden, targets)
    quack = member("quack", "quack.linear_cross_entropy", "chunked_linear_cross_entropy")
    if quack is not None:
        peers["quack"] = lambda: quack(hidden, weight, targets, reduction="sum", tuned=options.tuned)
    return peers


def divergence_peers(student, teacher):
    """The same for the divergence."""
    compiled_loss = compiled(eager_divergence)
    peers = {
        "torch_eager": lambda: eager_divergence(student, teacher),
        "torch_compile": lambda: compiled_loss(student, teacher),
        "liger": None,
    }
    liger = member("liger_kernel", "liger_kernel.transformers", "LigerFusedLinearJSD")
    if liger is not None:
        loss = liger(jsd_beta=0.5)
        peers["liger"] = lambda: loss(*student, *teacher, None)
    return peers


def products(hidden, weight, teacher):
    """The bare products: three, or four with a teacher's."""
    hidden, weight = hidden.detach(), weight.detach()
    operand = torch.randn(hidden.shape[0], VOCAB, device="cuda", dtype=torch.bfloat16).mul_(1e-3)
    logits = torch.empty_like(operand)
    grad_hidden = torch.empty_like(hidden)
    grad_weight = torch.zeros(VOCAB, hidden.shape[1], device="cuda")
    adds_fp32 = True
    try:
        torch.addmm(grad_weight, operand.T, hidden, out_dtype=torch.float32, out=grad_weight)
    except (TypeError, RuntimeError) as error:
        print(f"the products' grad_weight is bf16, because this PyTorch has none into fp32: {str(error).splitlines()[0]}")
        adds_fp32 = False
        grad_weight = grad_weight.bfloat16()

    def run():
        torch.mm(hidden, weight.T, out=logits)
        if teacher is not None:
            torch.mm(teacher[0], teacher[1].T, out=logits)
        torch.mm(operand, weight, out=grad_hidden)
        if adds_fp32:
            torch.addmm(grad_weight, operand.T, hidden, out_dtype=torch.float32, out=grad_weight)
        else:
            torch.addmm(grad_weight, operand.T, hidden, out=grad_weight)

    return run


def time_block(work, count):
    """Milliseconds of one call."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        work()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start) / count


def compare(floor, peer, seconds):
    """(peer's ms, floor's ms, ratio, spread of the ratios), sustained."""
    floor_count = max(1, round(1000 * seconds / time_block(floor, 3)))
    peer_count = max(1, round(1000 * seconds / time_block(peer, 2)))
    time_block(floor, floor_count)  # at full load from here on
    floors, peers = [time_block(floor, floor_count)], []
    for _ in range(2):
        peers.append(time_block(peer, peer_count))
        floors.append(time_block(floor, floor_count))
    ratios = [ms / (0.5 * (before + after)) for ms, before, after in zip(peers, floors[:-1], floors[1:], strict=True)]
    median = statistics.median(ratios)
    return statistics.median(peers), statistics.median(floors), median, (max(ratios) - min(ratios)) / median


def peak_mib(peer):
    """Of one call, beyond what is there: inputs and their gradients."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    peer()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure_case(name, options, machine):
    """Rows of one case."""
    rows, width, teacher_width = CASES[name]
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(count, columns, deviation, trainable):
        values = torch.randn(count, columns, device="cuda", dtype=torch.bfloat16, generator=generator).mul_(deviation)
        return values.requires_grad_(trainable)

    hidden, weight = normal(rows, width, 1, True), normal(VOCAB, width, width**-0.5, True)
    teacher = None
    if teacher_width > 0:
        teacher = normal(rows, teacher_width, 1, False), normal(VOCAB, teacher_width, teacher_width**-0.5, False)
        peers = divergence_peers((hidden, weight), teacher)
    else:
        targets = torch.randint(VOCAB, (rows,), device="cuda", generator=generator)
        peers = cross_entropy_peers(hidden, weight, targets, options)

    def without_gradients(work):
        def run():
            hidden.grad = weight.grad = None
            work().backward()

        return run

    taken = []
    for peer_name, work in peers.items():
        case = f"{figures.GPU_PREFIX}{name}_{peer_name}"
        if options.peers and peer_name not in options.peers.split(","):
            continue
        if work is None:
            print(f"{case:60} not there: its package is not installed")
            continue
        run = without_gradients(work)
        try:
            for _ in range(3):
                run()  # compiles
            gradients = sum(tensor.grad.nbytes for tensor in (hidden, weight)) / 2**20
            hidden.grad = weight.grad = None
            peak = peak_mib(run) - gradients
            hidden.grad = weight.grad = None
            floor = products(hidden, weight, teacher)
            ms, floor_ms, ratio, spread = compare(floor, run, options.seconds)
        except Exception as error:  # whatever another library raises: the others' figures still count
            print(f"{case:60} failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}")
            continue
        finally:
            floor = None
            gc.collect()
            torch.cuda.empty_cache()
        print(f"{case:60} {ms:9.2f} ms  {ratio:7.3f} x {floor_ms:.2f} ms  spread {spread:.3f}  peak {peak:8.0f} MiB")
        for suffix, value, unit in (
            ("ms", ms, "ms"),
            ("ratio", ratio, "x products"),
            ("spread", spread, "(max-min)/median"),
            ("peak_mib", peak, "MiB"),
        ):
            taken.append(figures.row(f"{case}_{suffix}", value, unit, machine, options.commit))
    return taken


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="cases, with commas between them")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a block")
    parser.add_argument("--tuned", action="store_true", help="QuACK searches its configurations, which takes minutes")
    parser.add_argument("--peers", help="these only, with commas between them")
    parser.add_argument("--output", help="CSV file that the figures go into")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("PyTorch finds no GPU")
    unknown = set(options.cases.split(",")) - set(CASES)
    if unknown:
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}")
    machine = f"{torch.cuda.get_device_name()}; PyTorch {torch.__version__}; CUDA {torch.version.cuda}"
    print(machine)
    for name in options.cases.split(","):
        taken = measure_case(name, options, machine)
        if options.output:
            figures.merge(options.output, taken)


if __name__ == "__main__":
    main()
