"""A run of headwater.jax.value_and_grad over several devices, in this process or in several: the program, and what starts it.

jax_split_ranks.py ADDRESS FOLDER COORDINATOR RANK PROCESSES DEVICES prints what one process of it has seen, as JSON.
"""

import json
import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

ENVIRONMENTS = ("jax",)

HIDDEN, VOCAB = 8, 12
STEPS, BATCHES = 2, 2
LEARNING_RATE, MAX_GRAD_NORM = 0.5, 0.25


def body(params, batch):
    return jnp.tanh(batch @ params["w"] + params["b"])


def params_of():
    rng = np.random.default_rng(1)
    return {"w": rng.standard_normal((6, HIDDEN)).astype(np.float32), "b": rng.standard_normal(HIDDEN).astype(np.float32)}


def weights_of():
    return np.random.default_rng(2).standard_normal((HIDDEN, VOCAB)).astype(np.float32)


def batch_of(step, number):
    """Inputs, labels, and weights of tokens, which differ from shard to shard."""
    rng = np.random.default_rng([step, number])
    labels = rng.integers(0, VOCAB, (8, 3)).astype(np.int32)
    labels[0, :2] = -100
    return rng.standard_normal((8, 3, 6)).astype(np.float32), labels, rng.uniform(0.5, 2, (8, 3)).astype(np.float32)


def run_ranks(address, folder, processes, devices):
    """The printed results of each process of the program; `folder` is for Orbax."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        coordinator = f"127.0.0.1:{listening.getsockname()[1]}"
    started = [
        subprocess.Popen(
            [sys.executable, __file__, address, str(folder), coordinator, str(rank), str(processes), str(devices)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        for rank in range(processes)
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def main(address, folder, coordinator, rank, processes, devices):
    jax.config.update("jax_num_cpu_devices", devices)
    if processes > 1:
        jax.distributed.initialize(coordinator, processes, rank)
    import orbax.checkpoint as ocp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import headwater
    import headwater.jax
    import headwater.jax.orbax

    mesh = jax.make_mesh((processes * devices // 2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def on_mesh(array, *axes):
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, PartitionSpec(*axes)), lambda index: array[index])

    events = []

    def seen(name, call):
        def watched(*args, **keywords):
            events.append(name)
            return call(*args, **keywords)

        return watched

    client = headwater.connect(address)
    name = f"ranks-{processes}"
    head = headwater.jax.create_head(client, name, weights_of(), optimizer=headwater.SGD(), if_exists="attach")
    headwater.Head.cross_entropy_future = seen("sent", headwater.Head.cross_entropy_future)
    headwater._futures.Future.result = seen("waited", headwater._futures.Future.result)

    loss_and_grads = headwater.jax.value_and_grad(body, head, reduction="mean")
    params = jax.tree.map(on_mesh, params_of())
    losses, norms, ids = [], [], []
    rows = ("data", "model")

    def arrays_of(step, number):
        inputs, labels, weight = batch_of(step, number)
        # Labels as an array of the host, and split over the devices.
        return on_mesh(inputs, rows), labels if number else on_mesh(labels, rows), on_mesh(weight, rows)

    for step in range(STEPS):
        sums = None
        for number in range(BATCHES):
            inputs, labels, weight = arrays_of(step, number)
            loss, grads = loss_and_grads(params, inputs, labels, weight=weight)
            losses.append(float(loss))
            sums = grads if sums is None else jax.tree.map(jnp.add, sums, grads)
        closed = headwater.jax.apply_optimizer_step(head, learning_rate=LEARNING_RATE, grads=sums, max_grad_norm=MAX_GRAD_NORM)
        norms.append(closed.grad_norm)
        ids.append(sorted(head.step_state().last_closed.micro_batches))
        params = jax.tree.map(lambda leaf, grad: leaf - LEARNING_RATE * grad, params, closed.grads)
    seen_events = list(events)

    # Only the last shard is not finite: all processes learn it, and close the step.
    inputs, labels, _ = batch_of(0, 1)
    inputs[-1] = np.nan
    _, grads = loss_and_grads(params, on_mesh(inputs, rows), labels)

    def refusal():
        try:
            headwater.jax.apply_optimizer_step(head, learning_rate=LEARNING_RATE, grads=grads)
        except headwater.HeadwaterError as error:
            return error.reason or error.code
        return "accepted"

    not_finite = refusal()
    # A loss of the last process has failed inside of a program: the others do not wait for it.
    if rank == processes - 1:
        headwater.jax._submissions.submissions_of(head).keep_error(headwater.UnavailableError("the server is away"))
    failed = refusal()
    step_after_discard = head.discard_gradient().open_step

    # Orbax, on all processes: the head goes back to the step that was saved, or nowhere.
    weight = head.weight()
    with ocp.CheckpointManager(folder) as manager:
        state = ocp.args.StandardSave(params)
        manager.save(1, args=ocp.args.Composite(state=state, head=headwater.jax.orbax.HeadSave(head)))
        manager.wait_until_finished()
        headwater.jax.apply_optimizer_step(head, learning_rate=LEARNING_RATE, allow_empty=True)
        restore = ocp.args.Composite(head=headwater.jax.orbax.HeadRestore(head))
        manager.restore(1, args=restore)
        restored = [head.step, bool((head.weight() == weight).all())]
        if rank == 0:
            head.delete_checkpoint(manager.item_metadata(1)["head"].checkpoint)
        try:
            manager.restore(1, args=restore)
        except headwater.HeadwaterError as error:
            restored.append(error.reason)

    local = jax.device_put(batch_of(0, 0)[0], jax.local_devices()[0])

    def along_hidden_size(params, batch):
        return jax.lax.with_sharding_constraint(body(params, batch), NamedSharding(mesh, PartitionSpec(None, None, "model")))

    cases = [(along_hidden_size, on_mesh(inputs))]
    if processes > 1:
        cases += [(body, on_mesh(inputs)), (lambda params, batch: jnp.ones((*batch.shape[:2], HIDDEN)) * batch.sum(), local)]
    refusals = []
    for function, batch in cases:
        own = jax.tree.map(np.asarray, params) if batch is local else params
        try:
            headwater.jax.value_and_grad(function, head)(own, batch, labels)
            refusals.append("accepted")
        except headwater.InvalidArgumentError as error:
            refusals.append(str(error))
    print(
        json.dumps(
            {
                "losses": losses,
                "norms": norms,
                "ids": ids,
                "params": jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), params),
                "weight": head.weight().tolist(),
                "events": seen_events,
                "not_finite": not_finite,
                "failed": failed,
                "step_after_discard": step_after_discard,
                "restored": restored,
                "refusals": refusals,
            }
        ),
        flush=True,
    )
    client.close()


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
