#!/usr/bin/env python3
"""Says what a server needs for its heads: reads plans that the server made, prints a patch for deploy/kubernetes/base.

    headwaterctl --json plan --vocab_size=128256 --hidden_size=4096 --data_type=bfloat16 --trainable --optimizer=adamw >head.json
    deploy/kubernetes/size.py --engine cpu head.json [head.json ...]

Name a plan once for each head of its kind. Plans with --ranks are for a server of several GPUs (--engine cuda, an overlay with
components/gpus) or of several processes (--engine cpu, overlays/multi-node). Budgets are of one of them. With --sidecar the patch
is for components/sidecar, with or without a component that gives it a GPU. The rules are in docs/deployment.md, "Sizing".
"""

import argparse
import json
import math
import sys
from pathlib import Path

GIB = 1 << 30
# Memory besides rows and heads: code, threads, buffers of gRPC; with CUDA also the driver's part on the host.
PROCESS_BYTES = {"cpu": GIB, "cuda": 2 * GIB}
# With several GPUs: the driver's part for each but the first, and what NCCL shares between them in /dev/shm.
FURTHER_GPU_BYTES = GIB
NCCL_BYTES = GIB
SAVED = ("weight", "bias", "master_weight", "optimizer_state")
# Beside the training's own series those of docs/deployment.md, backup-DATE and before-upgrade-DATE, each of --keep_checkpoints.
FURTHER_SERIES = 2
SHORTEST_DRAIN_S = 60
# Between --drain_timeout and the kubelet's SIGKILL.
GRACE_BEYOND_DRAIN_S = 30
# The container of a separate server, and of a worker.
CONTAINER = "/spec/template/spec/containers/0"


def purposes(plan: dict, which: str = "memory_plan") -> dict[str, int]:
    return {item["purpose"]: int(item["bytes"]) for item in plan[which]["items"]}


def ranks_of(plans: list[dict]) -> int:
    """How many ranks the plans are for, which is one number; 1 without --ranks."""
    ranks = {plan.get("ranks", 1) for plan in plans}
    if len(ranks) > 1:
        sys.exit(f"size: all plans must be for the same number of ranks, these are for {sorted(ranks)}")
    return ranks.pop()


def round_up(value: float, step: int) -> int:
    return math.ceil(value / step) * step


def size(
    plans: list[dict],
    engine: str,
    keep: int,
    extra_checkpoints: int,
    disk_bytes_per_s: float,
    in_flight: int,
    held_rows: int,
    joined: int,
) -> dict[str, int]:
    """Bytes and seconds by name; see "Sizing"."""
    heads = [purposes(plan) for plan in plans]
    ranks = ranks_of(plans)
    held = [purposes(plan, "rank_plan") for plan in plans] if ranks > 1 else heads
    # On the CPU each head has a workspace of its own; on a GPU the heads share the largest. All else belongs to one head.
    workspaces = [head["workspace"] for head in held]
    budget = sum(sum(head.values()) for head in held)
    if engine == "cuda":
        budget += max(workspaces) - sum(workspaces)
    budget = round_up(budget, GIB)
    saved = [sum(head.get(purpose, 0) for purpose in SAVED) for head in heads]
    # A weight may be sent as fp32 whatever it is stored as: at most twice the bytes of a 16-bit one.
    upload = round_up(2 * max(head["weight"] for head in heads), GIB)
    host = (budget if engine == "cpu" else 0) + in_flight + upload + held_rows + joined + PROCESS_BYTES[engine]
    if engine == "cuda" and ranks > 1:
        host += (ranks - 1) * FURTHER_GPU_BYTES + NCCL_BYTES
    # Half of the drain is kept for saving, all heads one after the other.
    drain = round_up(max(SHORTEST_DRAIN_S, 2 * sum(saved) / disk_bytes_per_s), 60)
    return {
        "ranks": ranks,
        "memory_budget_bytes": budget,
        "max_in_flight_bytes": in_flight,
        "max_upload_bytes": upload,
        "max_held_bytes": held_rows,
        "max_join_bytes": joined,
        "host_memory_bytes": round_up(host, GIB),
        # Memory of a worker (--engine cpu): its shard, and the rows of one micro-batch at a time; all that are in flight are a
        # bound.
        "worker_memory_bytes": round_up(budget + in_flight + PROCESS_BYTES[engine], GIB),
        # The kept checkpoints, the one that is being written, `drain`, and the checkpoints beside the training's.
        "volume_bytes": round_up((keep + 2 + extra_checkpoints) * sum(saved) * 1.1, GIB),
        "drain_timeout_s": drain,
        "grace_s": drain + GRACE_BEYOND_DRAIN_S,
    }


def patch_lines(kind: str, name: str, operations: list[tuple]) -> list[str]:
    """An entry of `patches` for the objects of that kind, and with that name unless it is empty."""
    lines = ["  - target:", f"      kind: {kind}", *([f"      name: {name}"] if name else []), "    patch: |-"]
    for operation, path, value in operations:
        lines += [f"      - op: {operation}", f"        path: {path}", f"        value: {value}"]
    return lines


def memory_operations(memory_bytes: int, container: str = CONTAINER) -> list[tuple]:
    return [("replace", f"{container}/resources/{kind}/memory", f"{memory_bytes // GIB}Gi") for kind in ("requests", "limits")]


def flags_of(sizes: dict[str, int], keep: int) -> list[str]:
    byte_flags = ("memory_budget_bytes", "max_in_flight_bytes", "max_upload_bytes", "max_held_bytes", "max_join_bytes")
    flags = [f"--{name}={sizes[name]}" for name in byte_flags]
    return [*flags, f"--keep_checkpoints={keep}", f"--drain_timeout={sizes['drain_timeout_s']}s"]


def sidecar_patch(sizes: dict[str, int], keep: int) -> str:
    """Like patch(), for Pods and Jobs with a sidecar. Its volume is the pod's owner's to give."""
    lines = ["patches:"]
    for kind, spec in (("Pod", "/spec"), ("Job", "/spec/template/spec")):
        container = f"{spec}/initContainers/0"
        operations = [("add", f"{container}/args/-", flag) for flag in flags_of(sizes, keep)]
        operations += memory_operations(sizes["host_memory_bytes"], container)
        operations.append(("replace", f"{spec}/terminationGracePeriodSeconds", sizes["grace_s"]))
        lines += patch_lines(kind, "", operations)
    return "\n".join(lines)


def patch(sizes: dict[str, int], keep: int, engine: str) -> str:
    """A part of a kustomization.yaml. Flags go to the end: of several the last one counts."""
    ranks = sizes["ranks"]
    flags = flags_of(sizes, keep)
    if ranks > 1:
        flags.append(f"--gpus={ranks}" if engine == "cuda" else f"--workers={ranks - 1}")
    operations = [("add", f"{CONTAINER}/args/-", flag) for flag in flags]
    operations += memory_operations(sizes["host_memory_bytes"])
    if ranks > 1 and engine == "cuda":
        operations.append(("replace", f"{CONTAINER}/resources/limits/nvidia.com~1gpu", f'"{ranks}"'))
    operations += [
        ("replace", "/spec/template/spec/terminationGracePeriodSeconds", sizes["grace_s"]),
        ("replace", "/spec/volumeClaimTemplates/0/spec/resources/requests/storage", f"{sizes['volume_bytes'] // GIB}Gi"),
    ]
    lines = ["patches:", *patch_lines("StatefulSet", "headwater", operations)]
    if ranks > 1 and engine == "cpu":
        budget = f"--memory_budget_bytes={sizes['memory_budget_bytes']}"
        drain = f"--drain_timeout={sizes['drain_timeout_s']}s"  # a worker stays until its leader has saved
        worker = [("add", f"{CONTAINER}/args/-", flag) for flag in (budget, drain)]
        worker += [
            ("replace", "/spec/template/spec/terminationGracePeriodSeconds", sizes["grace_s"]),
            ("replace", "/spec/replicas", ranks - 1),
        ]
        lines += patch_lines("StatefulSet", "headwater-worker", worker + memory_operations(sizes["worker_memory_bytes"]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plans", type=Path, nargs="+", help="what `headwaterctl --json plan` printed, once for each head")
    parser.add_argument("--engine", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--keep_checkpoints", type=int, default=3)
    parser.add_argument(
        "--extra_checkpoints",
        type=int,
        help="of each head, that stay beside those of its training and `drain`: backups; without it twice --keep_checkpoints",
    )
    parser.add_argument(
        "--disk_mb_per_s", type=float, default=200.0, help="what the volume writes for sure, in 10^6 bytes a second"
    )
    parser.add_argument("--max_in_flight_bytes", type=int, default=4 * GIB)
    parser.add_argument("--max_held_bytes", type=int, default=GIB)
    parser.add_argument("--max_join_bytes", type=int, default=GIB)
    parser.add_argument("--sidecar", action="store_true", help="print a patch for Pods and Jobs with components/sidecar")
    parser.add_argument("--json", action="store_true", help="print the numbers instead of the patch")
    arguments = parser.parse_args()
    if arguments.keep_checkpoints < 1 or arguments.disk_mb_per_s <= 0:
        sys.exit("size: --keep_checkpoints must be at least 1, --disk_mb_per_s above 0")
    extra = arguments.extra_checkpoints
    if extra is None:
        extra = FURTHER_SERIES * arguments.keep_checkpoints
    if extra < 0:
        sys.exit("size: --extra_checkpoints must be at least 0")
    plans = [json.loads(path.read_text()) for path in arguments.plans]
    sizes = size(
        plans,
        arguments.engine,
        arguments.keep_checkpoints,
        extra,
        arguments.disk_mb_per_s * 1e6,
        arguments.max_in_flight_bytes,
        arguments.max_held_bytes,
        arguments.max_join_bytes,
    )
    if arguments.sidecar and sizes["ranks"] > 1:
        sys.exit("size: a sidecar is one process with one GPU at most; make the plans without --ranks")
    if arguments.json:
        print(json.dumps(sizes, indent=1))
    elif arguments.sidecar:
        print(sidecar_patch(sizes, arguments.keep_checkpoints))
    else:
        print(patch(sizes, arguments.keep_checkpoints, arguments.engine))


if __name__ == "__main__":
    main()
