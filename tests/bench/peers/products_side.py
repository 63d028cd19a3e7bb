#!/usr/bin/env python3
"""Stands in for engine_side_cuda where there is no GPU: its commands (engine_side.cc), computed by PyTorch on the CPU.

products_side.py FOLDER
"""

import pathlib
import sys
import time

import peers
import torch


def read(folder, name, columns):
    """bf16 [rows, columns]."""
    return torch.frombuffer(bytearray((folder / name).read_bytes()), dtype=torch.bfloat16).view(-1, columns)


class Side:
    def __init__(self, folder):
        self._folder = folder
        self._problem = None

    def load(self, rows, width, vocab, teacher_width, micro_batches, beta_percent):
        targets = torch.frombuffer(bytearray((self._folder / "targets").read_bytes()), dtype=torch.int32).long()
        teacher = None
        if teacher_width:
            teacher = tuple(read(self._folder, f"teacher_{name}", teacher_width) for name in ("hidden", "weight"))
        hidden, weight = (read(self._folder, name, width) for name in ("hidden", "weight"))
        if hidden.shape != (rows, width) or weight.shape != (vocab, width) or len(targets) != rows:
            raise ValueError("the files are not of this shape")
        self._problem = peers.Problem(hidden, weight, targets, micro_batches, teacher, beta_percent / 100)
        self._compute = peers.by_row_pass(peers.derivative)
        self._problem.prepare("fp32")

    def products(self, count):
        return self._time(lambda: self._compute(self._problem, self._problem.parts[0], "fp32", False), count)

    def add(self, count):
        return self.products(count)

    def step(self, count):
        parts = self._problem.parts

        def run():
            for number, part in enumerate(parts):
                self._compute(self._problem, part, "fp32", number == 0)

        return self._time(run, count) / len(parts)

    def resolution(self, tau):
        if not 0 <= tau <= 1:
            raise ValueError(f"resolution {tau}; expected a number in [0, 1]")

    def gradients(self):
        self._problem.prepare("fp32")
        part = self._problem.parts[0]
        loss = self._compute(self._problem, part, "fp32", True)
        part.hidden.grad.view(torch.int16).numpy().tofile(self._folder / "grad_hidden")
        self._problem.main_grad.numpy().tofile(self._folder / "grad_weight")
        return float(loss)

    def watch(self):
        pass

    def seen(self):
        return "0 0 0 0"

    def free(self):
        self._problem = None

    @staticmethod
    def _time(work, count):
        start = time.perf_counter()
        for _ in range(count):
            work()
        return 1000 * (time.perf_counter() - start) / count


def main():
    side = Side(pathlib.Path(sys.argv[1]))
    for line in sys.stdin:
        command, *words = line.split()
        try:
            answer = getattr(side, command)(*map(float if command == "resolution" else int, words))
            print("ok", "" if answer is None else answer, flush=True)
        except Exception as error:
            print("error", type(error).__name__, error, flush=True)


if __name__ == "__main__":
    main()
