#!/usr/bin/env python3
"""Samples a GPU every 20 ms: a time on a power-limited card means nothing without its clock.

    card_monitor.py PCI_BUS_ID      # as CUDA prints it

Answers each line of standard input with what was sampled since the last line, all zeros without NVML. First comes the number of
samples. Means follow: SM clock in MHz, power in watts, temperature in degrees Celsius. Last come all of NVML's throttle reasons.
"""

import ctypes
import functools
import operator
import os
import select
import sys

SM_CLOCK, GPU_TEMPERATURE = 1, 0  # NVML's numbers


def sampler(bus):
    """A function that returns (MHz, mW, degrees Celsius, reasons) or None, or None where NVML is not there."""
    device, small, large = ctypes.c_void_p(), ctypes.c_uint, ctypes.c_ulonglong
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        readings = [
            (nvml.nvmlDeviceGetClockInfo, (SM_CLOCK,), small()),
            (nvml.nvmlDeviceGetPowerUsage, (), small()),
            (nvml.nvmlDeviceGetTemperature, (GPU_TEMPERATURE,), small()),
            (nvml.nvmlDeviceGetCurrentClocksThrottleReasons, (), large()),
        ]
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByPciBusId_v2(bus.encode(), ctypes.byref(device)):
            return None
    except (OSError, AttributeError):
        return None

    def sample():
        failed = [read(device, *which, ctypes.byref(value)) for read, which, value in readings]
        return None if any(failed) else [value.value for *_, value in readings]

    return sample


def main():
    take = sampler(sys.argv[1])
    samples = []
    while True:
        if select.select([sys.stdin], [], [], 0.02 if take else None)[0]:
            lines = os.read(sys.stdin.fileno(), 4096).count(b"\n")
            if not lines:
                return
            for _ in range(lines):
                mhz, milliwatts, celsius = (sum(sample[i] for sample in samples) / max(1, len(samples)) for i in range(3))
                reasons = functools.reduce(operator.or_, (sample[3] for sample in samples), 0)
                print(len(samples), mhz, milliwatts / 1000, celsius, reasons, flush=True)
                samples = []
        elif (found := take()) is not None:
            samples.append(found)


if __name__ == "__main__":
    main()
