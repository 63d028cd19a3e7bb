"""Data-parallel trainers as threads of one process."""

import threading


class Ranks:
    """Threads that behave as data-parallel processes: a barrier, and an all-reduce of the body's gradients."""

    def __init__(self, world_size):
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size, timeout=20)
        self.gradients = [None] * world_size

    def average(self, rank, parameters):
        self.gradients[rank] = [p.grad for p in parameters]
        self.barrier.wait()
        mean = [sum(group) / self.world_size if group[0] is not None else None for group in zip(*self.gradients, strict=True)]
        self.barrier.wait()
        for parameter, gradient in zip(parameters, mean, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()

    def run(self, work):
        errors = []

        def one(rank):
            try:
                work(rank)
            except BaseException as error:
                self.barrier.abort()
                errors.append(error)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        first = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        if errors:
            raise (first or errors)[0]
