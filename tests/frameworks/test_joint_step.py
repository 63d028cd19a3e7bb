"""JointStep: body and head step together, or neither does; a GradScaler decides for both."""

import pytest
import torch
from tiny_trainer import examples, tiny_model

import headwater
from headwater.torch._joint_step import JointStep
from headwater.transformers import HeadwaterConfig, attach_remote_head


class Loop:
    """A loop as frameworks have it, with a GradScaler on the CPU."""

    def __init__(self, client, name, *, kind, fused=False, scale=1024.0):
        self.model = tiny_model(tied=kind == "tied")
        optimizer = "torch" if kind == "torch" else "auto"
        self.remote = attach_remote_head(self.model, HeadwaterConfig(client=client, head=name, optimizer=optimizer))
        body = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(body, lr=1e-2, fused=fused)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        self.joint = JointStep([self.remote], self.optimizer, scaler=self.scaler)
        self.joint.begin(0)

    def step(self, seed, *, spoil_body=False, spoil_head=False, max_norm=0.5):
        inputs = {name: values[None] for name, values in examples(1, seed=seed)[0].items()}
        self.scaler.scale(self.model(**inputs).loss).backward()
        if spoil_body:
            self.model.model.norm.weight.grad[0] = float("inf")
        if spoil_head:
            head = self.remote.head
            source = head._micro_batch_source
            id_, _ = source.draw(head, head.step)
            values = torch.full((1, 32), 3e38)
            head.add_gradient(values, micro_batch=id_)
            id_, _ = source.draw(head, head.step)
            head.add_gradient(values, micro_batch=id_)

        def body_norm():
            self.scaler.unscale_(self.optimizer)
            return torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])

        norm = self.joint.clip(max_norm, body_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.joint.settle()
        self.optimizer.zero_grad()
        return norm

    def weights(self):
        self.remote.pull_weight()
        return {name: values.clone() for name, values in self.model.state_dict().items()}


def equal(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["served", "torch", "tied"])
@pytest.mark.parametrize("spoilt", ["spoil_body", "spoil_head"])
def test_overflow_on_one_side_skips_the_step_on_both(client, request, kind, fused, spoilt):
    name = f"overflow-{kind}-{int(fused)}-{spoilt.replace('_', '-')}"
    loop = Loop(client, name, kind=kind, fused=fused)
    loop.step(0)
    before = loop.weights()
    loop.step(1, **{spoilt: True})

    assert equal(loop.weights(), before)
    assert loop.scaler.get_scale() == 512.0
    assert (loop.joint.steps_applied, loop.joint.skipped, loop.remote.head.step) == (1, 1, 2)

    # The following steps equal those of a loop that never had the step.
    other = Loop(client, f"{name}-other", kind=kind, fused=fused)
    other.step(0)
    other.scaler.update(512.0)
    norms = [each.step(2) for each in (loop, other)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(loop.weights().values(), other.weights().values(), strict=True))


@pytest.mark.parametrize("kind", ["served", "torch", "tied"])
def test_scale_leaves_the_steps_as_they_are(client, kind):
    loops = [Loop(client, f"scale-{kind}-{int(scale)}", kind=kind, scale=scale) for scale in (1.0, 4096.0)]
    norms = [[loop.step(seed) for seed in range(4)] for loop in loops]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    first, second = (loop.weights() for loop in loops)
    assert all(torch.allclose(first[name], second[name], atol=1e-5) for name in first)


def test_body_stays_where_the_server_cannot_step(client):
    loop = Loop(client, "gone", kind="served")
    loop.step(0)
    body = {name: values.clone() for name, values in loop.model.state_dict().items()}
    client.head("gone").take()  # another run has it now
    inputs = {name: values[None] for name, values in examples(1, seed=1)[0].items()}
    with pytest.raises(headwater.EpochFencedError):
        loop.scaler.scale(loop.model(**inputs).loss).backward()
        loop.optimizer.step()
    assert equal(loop.model.state_dict(), body)


def test_closing_takes_the_hooks_off(client):
    loop = Loop(client, "closed", kind="served")
    loop.joint.close()
    assert not loop.optimizer._optimizer_step_pre_hooks and not loop.optimizer._optimizer_step_post_hooks


def test_lbfgs_is_refused(client):
    model = tiny_model()
    remote = attach_remote_head(model, HeadwaterConfig(client=client, head="lbfgs"))
    with pytest.raises(headwater.InvalidArgumentError, match="LBFGS"):
        JointStep([remote], torch.optim.LBFGS(model.model.parameters()))
