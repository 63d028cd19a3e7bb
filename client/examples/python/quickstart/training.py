"""The parts that training and distillation share: the learning rate, memory, results."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import tqdm


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Rises over the first tenth, then falls as a cosine to a tenth of the peak."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def memory_bytes(line: str) -> int:
    """A line of /proc/self/status, in bytes: VmHWM is the peak of the resident set, VmRSS its present size."""
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith(line + ":"):
            return 1024 * int(text.split()[1])
    raise RuntimeError(f"/proc/self/status has no {line}")


def progress(steps: int, description: str) -> tqdm.tqdm:
    """A progress bar; on a terminal live, in a log a line every few seconds."""
    live = sys.stderr.isatty()
    return tqdm.tqdm(total=steps, desc=f"{description:<28}", unit="step", mininterval=0.1 if live else 10, dynamic_ncols=live)


def write_results(path: Path, results: dict[str, Any]) -> None:
    """As JSON; NaN is written as null, which no bound accepts."""
    clean = json.loads(json.dumps(results), parse_constant=lambda _: None)
    path.write_text(json.dumps(clean, indent=1) + "\n")
