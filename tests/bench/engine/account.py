#!/usr/bin/env python3
"""A kernel-by-kernel account of one micro-batch on a GPU: time, bytes of device memory, and the shares of the chip's peaks.

    tests/bench/engine/account.py BUNDLE [--cases NAME,...] [--algorithms FILE.json] [--output FILE.md]

Runs engine_bench_cuda of a bundle (deploy/bundle) under Nsight Compute (ncu), and prints a table in Markdown for each case. The
command ncu must be on the PATH or in /usr/local/cuda/bin. It runs every kernel by itself, without the load of its neighbours.
Clocks are a burst's, and times are up to a tenth below those of sustained work (docs/benchmarks/engine.md). Bytes are what the
counters of the memory controllers say, so what the L2 cache keeps is not in them.
"""

import argparse
import csv
import os
import pathlib
import re
import shutil
import subprocess
import sys

CASES = "ce_n4096_h4096_v128256,jsd_n4096_hs4096_ht4096_v128256"
METRICS = {
    "gpu__time_duration.sum": "time",
    "dram__bytes_read.sum": "read",
    "dram__bytes_write.sum": "written",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "memory_share",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active": "tensor_share",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "sm_share",
}
# Launches of one micro-batch, at most; the benchmark makes more micro-batches than those that are looked at.
WANTED, SKIPPED = 44, 16
# Kernels that multiply matrices: cuBLASLt's and the engine's own.
PRODUCT = re.compile(r"nvjet|gemm|cutlass|xmma|::ProductKernel", re.IGNORECASE)


def scaled(value, unit):
    """A number in seconds, bytes or per cent."""
    factors = {"ns": 1e-9, "us": 1e-6, "usecond": 1e-6, "ms": 1e-3, "nsecond": 1e-9, "msecond": 1e-3, "s": 1.0, "second": 1.0}
    factors |= {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "%": 1.0, "": 1.0}
    return float(value.replace(",", "")) * factors[unit]


def profile(ncu, bundle, case, algorithms):
    """[(kernel's name, {quantity: number})] of the launches inside the engine's ranges, in the order of the stream."""
    program = [str(bundle / "bin/engine_bench_cuda"), f"--cases={case}", "--seconds=0.01", "--warmup=0", "--rounds=3", "--idle=0"]
    if algorithms:
        program.append(f"--algorithms={algorithms}")
    command = [ncu, "--csv", "--page", "raw", "--metrics", ",".join(METRICS), "--nvtx", "--nvtx-include", "micro_batch/"]
    command += ["--clock-control", "none", "--cache-control", "none", "--launch-skip", str(SKIPPED), "--launch-count", str(WANTED)]
    output = subprocess.run([*command, *program], check=False, stdout=subprocess.PIPE, text=True).stdout
    lines = [line for line in output.splitlines() if line.startswith('"')]
    if len(lines) < 3:
        sys.exit(f"ncu reported nothing about {case}:\n{output[-2000:]}")
    rows = list(csv.DictReader(lines))
    units, launches = rows[0], []
    for row in rows[1:]:
        numbers = {
            name: scaled(row[metric], units[metric]) for metric, name in METRICS.items() if row.get(metric) not in (None, "", "n/a")
        }
        launches.append((row["Kernel Name"], numbers))
    return launches


def one_period(launches):
    """The launches of one micro-batch: from one that begins a repetition of names to the next one."""
    names = [name for name, _ in launches]
    for length in range(1, len(names) // 2 + 1):
        if all(names[i] == names[i + length] for i in range(len(names) - length)):
            # A micro-batch begins with the check of its rows.
            first = next((i for i in range(length) if "CheckRows" in names[i]), 0)
            return launches[first : first + length]
    sys.exit(f"no micro-batch repeats within {len(names)} launches: {', '.join(sorted(set(names)))}")


def short(name):
    """A kernel's own name."""
    name = re.sub(r"<unnamed>::|\(anonymous namespace\)::|\b\w+::|^void ", "", name)
    return re.split(r"[(<]", name)[0].strip()


def table(case, launches):
    """Markdown."""
    rows, width, vocab = (int(re.search(pattern, case).group(1)) for pattern in (r"_n(\d+)", r"_hs?(\d+)", r"_v(\d+)"))
    lines = [f"`{case}`", "", "| kernel | ms | GB read | GB written | TB/s | of memory's peak | TFLOP/s | of the SMs' peak |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    total = read = written = 0.0
    for name, numbers in launches:
        seconds, moved = numbers["time"], numbers["read"] + numbers["written"]
        flops = f"{2e-12 * rows * width * vocab / seconds:.0f}" if PRODUCT.search(name) else ""
        share = numbers.get("tensor_share" if flops else "sm_share", numbers.get("sm_share", 0.0))
        lines.append(
            f"| `{short(name)}` | {1e3 * seconds:.3f} | {1e-9 * numbers['read']:.3f} | {1e-9 * numbers['written']:.3f} | "
            f"{1e-12 * moved / seconds:.2f} | {numbers['memory_share']:.0f} % | {flops} | {share:.0f} % |"
        )
        total, read, written = total + seconds, read + numbers["read"], written + numbers["written"]
    lines.append(
        f"| all | {1e3 * total:.3f} | {1e-9 * read:.2f} | {1e-9 * written:.2f} | {1e-12 * (read + written) / total:.2f} | | | |"
    )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=pathlib.Path)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--algorithms", help="the engine's file of algorithms: nothing is searched that is in it")
    parser.add_argument("--output", type=pathlib.Path, help="file for the tables")
    options = parser.parse_args()
    ncu = shutil.which("ncu", path=os.environ.get("PATH", "") + ":/usr/local/cuda/bin")
    if ncu is None:
        sys.exit("ncu is neither on the PATH nor in /usr/local/cuda/bin")
    tables = []
    for case in options.cases.split(","):
        tables.append(table(case, one_period(profile(ncu, options.bundle, case, options.algorithms))))
        print(tables[-1], flush=True)
        print()
    if options.output:
        options.output.write_text("\n\n".join(tables) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
