"""The quickstart's table and plot, and whether every value is within its bound."""

from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np

import training

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# One file of results each: PyTorch's own head with one and with two threads, the remote head, the distillation.
RUNS = ("own-1", "own-2", "remote", "distillation")

LOSS_BOUND = 1e-6
GRADIENT_BOUND = 1e-5
CURVE_FACTOR = 3.0
DIVERGENCE_BOUND = 0.8  # after / before
SMALLEST_DISTANCE = 1e-8  # nats a token; below it the axis of distances is linear, so that 0 has a place


class Check(NamedTuple):
    """A measured value that must not be above its bound."""

    name: str
    value: float
    bound: float

    @property
    def is_within(self) -> bool:
        # NaN is in no relation to anything, so it does not pass.
        return self.value <= self.bound


def curve_distance(first: dict[str, Any], second: dict[str, Any]) -> float:
    """How far two loss curves lie apart, in nats a token: the mean over all steps of the absolute difference.

    Not the largest one: that is a single step's luck, and varies several times as much from run to run.
    """
    return float(np.mean(np.abs(np.array(first["losses"], dtype=float) - np.array(second["losses"], dtype=float))))


def largest(verdicts: list[dict[str, float]], key: str) -> float:
    """The largest of one kind of difference; NaN if there is none or one is NaN."""
    return float(np.max([np.nan if verdict[key] is None else verdict[key] for verdict in verdicts])) if verdicts else np.nan


def training_bytes(run: dict[str, Any]) -> int:
    """The trainer's peak memory beyond its libraries, data and body: the cost of training with that head."""
    return run["peak_bytes"] - run["baseline_bytes"]


def checks(results: dict[str, dict[str, Any]]) -> list[Check]:
    """Everything that must hold."""
    found = []
    for name, run in (("cross entropy", "remote"), ("divergence", "distillation")):
        parity = results[run]["parity"]
        found += [
            Check(f"largest relative difference, {name}, loss", largest(parity, "loss"), LOSS_BOUND),
            Check(f"largest relative difference, {name}, grad_hidden", largest(parity, "grad_hidden"), GRADIENT_BOUND),
            Check(f"largest relative difference, {name}, grad_weight", largest(parity, "grad_weight"), GRADIENT_BOUND),
        ]
    before, after = results["distillation"]["held_out_divergence"]
    own_distance = curve_distance(results["own-1"], results["own-2"])
    return [
        *found,
        Check(
            f"distance of the free-running curves, remote head (own head, other thread count: {own_distance:.2e})",
            curve_distance(results["remote"], results["own-1"]),
            CURVE_FACTOR * own_distance,
        ),
        Check("held-out divergence of the student, after / before", after / before, DIVERGENCE_BOUND),
    ]


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    """The lines of the table."""
    lines = [f"{'':34}{'own head':>14}{'own, 2 threads':>16}{'remote head':>14}"]

    def row(name: str, values: list[float], form: str) -> None:
        lines.append(f"{name:34}{values[0]:>14{form}}{values[1]:>16{form}}{values[2]:>14{form}}")

    runs = [results[name] for name in ("own-1", "own-2", "remote")]
    row("training loss, first step", [run["losses"][0] for run in runs], ".6f")
    row("training loss, last step", [run["losses"][-1] for run in runs], ".6f")
    row("held-out loss, before", [run["held_out"][0][1] for run in runs], ".6f")
    row("held-out loss, after", [run["held_out"][-1][1] for run in runs], ".6f")
    row("trainer's peak memory, MiB", [run["peak_bytes"] / 2**20 for run in runs], ".1f")
    row("  of it beyond libraries and body", [training_bytes(run) / 2**20 for run in runs], ".1f")
    row("head's memory on the server, MiB", [run["server_bytes"] / 2**20 for run in runs], ".1f")
    row("seconds", [run["seconds"] for run in runs], ".1f")
    lines += [
        "  The server computes on processor cores, or on a GPU, of its own beside the trainer's thread:",
        "  fewer seconds with the remote head show more hardware, not a faster head.",
    ]
    distillation = results["distillation"]
    lines += ["", f"{'distillation':34}{'before':>14}{'after':>16}"]
    for name, key in (("student's held-out divergence", "held_out_divergence"), ("student's held-out loss", "held_out_loss")):
        before, after = distillation[key]
        lines.append(f"{name:34}{before:>14.6f}{after:>16.6f}")
    return lines


def plot(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Curves, their differences, held-out figures and memory, in one picture."""
    own, own_other, remote, distillation = (results[name] for name in RUNS)
    figure, ((curves, differences), (divergence, memory)) = plt.subplots(2, 2, figsize=(13, 9), constrained_layout=True)

    curves.plot(own["losses"], color="tab:blue", linewidth=3, alpha=0.4, label="own head")
    curves.plot(remote["losses"], color="tab:orange", linewidth=1, label="remote head")
    curves.plot(*zip(*own["held_out"], strict=True), "o", color="tab:blue", markersize=9, alpha=0.4, label="own head, held out")
    curves.plot(*zip(*remote["held_out"], strict=True), ".", color="tab:orange", label="remote head, held out")
    curves.set(
        title="Language model: one curve if both heads train alike",
        xlabel="step\nHeld-out text is other files, with a level of its own: compare it with itself.",
        ylabel="loss, nats a token",
    )
    curves.legend()

    for label, other, color in (("own head, other thread count", own_other, "tab:blue"), ("remote head", remote, "tab:orange")):
        distance = np.abs(np.array(other["losses"]) - np.array(own["losses"]))
        differences.plot(distance, ".", color=color, markersize=4, label=label)
    differences.set_yscale("symlog", linthresh=SMALLEST_DISTANCE)
    differences.set(
        title="Distance of the curves: rounding, if both clouds lie alike",
        xlabel="step\nBlue: PyTorch's own head with one thread more. 0: the same in every bit.",
        ylabel="distance from the own head's curve, nats a token",
        ylim=(-SMALLEST_DISTANCE / 4, None),
    )
    differences.legend()

    divergence.plot(distillation["divergences"], color="tab:green", label="training text, during training")
    last = len(distillation["divergences"])
    held_out = distillation["held_out_divergence"]
    divergence.plot([0, last], held_out, "o", color="tab:red", label="held-out text, before and after")
    for step, value, side, above in zip((0, last), held_out, ("left", "right"), (8, -16), strict=True):
        divergence.annotate(f"{value:.3f}", (step, value), (0, above), textcoords="offset points", ha=side)
    divergence.set(
        title="Distillation: the student approaches its teacher",
        xlabel="step\nThe student does not train on held-out text: compare before with after.",
        ylabel="Jensen-Shannon divergence, nats",
        ylim=(0, 1.15 * max([*held_out, *distillation["divergences"]])),
    )
    divergence.legend(loc="lower left")

    bars = {
        "trainer, own head": (training_bytes(own), "tab:blue"),
        "trainer, remote head": (training_bytes(remote), "tab:orange"),
        "server, for the head": (remote["server_bytes"], "tab:gray"),
    }
    mebibytes = [size / 2**20 for size, _ in bars.values()]
    drawn = memory.bar(list(bars), mebibytes, color=[color for _, color in bars.values()])
    memory.bar_label(drawn, fmt="%.0f MiB", padding=3)
    memory.set(
        title="Where the head's memory is",
        xlabel="Trainer: peak beyond libraries, data and body\n({:.0f} and {:.0f} MiB: the client is a library too).\n"
        "Server: weight, gradient, AdamW's state, workspace.".format(
            own["baseline_bytes"] / 2**20, remote["baseline_bytes"] / 2**20
        ),
        ylabel="MiB",
        ylim=(0, 1.15 * max(mebibytes)),
    )

    figure.savefig(path, dpi=110)
    plt.close(figure)


def write(folder: Path, results: dict[str, dict[str, Any]]) -> int:
    """Prints the table and the bounds, writes results.json and curves.png; the exit status."""
    found = checks(results)
    print("", *table(results), "", sep="\n")
    for check in found:
        print(f"{check.name}: {check.value:.2e}, at most {check.bound:.2e}: {'OK' if check.is_within else 'MISSED'}")
    training.write_results(folder / "results.json", {"runs": results, "checks": [check._asdict() for check in found]})
    plot(results, folder / "curves.png")
    print(f"\nwritten: {folder}/results.json, {folder}/curves.png", flush=True)
    return 0 if all(check.is_within for check in found) else 1
