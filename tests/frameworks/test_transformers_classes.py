"""Every causal LM class of transformers: attach_remote_head() gives it its own loss and gradients, or refuses it by name."""

import contextlib
import gc

import pytest
import tiny_models
import torch
import transformers

import headwater
from headwater.transformers import HeadwaterConfig, attach_remote_head, detach_remote_head

ENVIRONMENTS = ("newest", "oldest")

# The least number of equal classes, out of 185 of transformers 5.24 and 129 of 4.56, more of which compute a loss of their own.
AT_LEAST_EQUAL = 145 if int(transformers.__version__.partition(".")[0]) >= 5 else 85
LOSS_TOLERANCE = 1e-5  # relative
GRADIENT_TOLERANCE = 1e-4  # relative to the largest element of the parameter's gradient
# An upper bound of gradients that are 0 up to rounding, of routers whose weights add up to 1, relative to the model's largest.
ROUNDING = 1e-5


class NotRun(Exception):
    """The model itself cannot train on ids and labels; the text is the reason."""


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def train_once(model):
    """Loss and gradients of one batch, in training mode without dropout's randomness."""
    ids, labels = tiny_models.batch()
    model.zero_grad()
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    return loss.item()


def stock(model):
    try:
        loss = train_once(model)
    except Exception as error:
        raise NotRun(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    return loss, gradients(model)


def compare(model, remote, loss, expected) -> str:
    actual = train_once(model)
    head, layer = remote.head, remote.layer
    head.seal(expected_micro_batches=remote.loss_fn.micro_batches)
    if head.owner == "trainer":
        head.pull_gradient()
    else:
        layer.weight.grad = torch.from_numpy(head.gradient().copy())
        if layer.bias is not None:
            layer.weight.grad, layer.bias.grad = (torch.from_numpy(part.copy()) for part in head.gradient(bias=True))
    if not abs(actual - loss) <= LOSS_TOLERANCE * abs(loss):
        return f"wrong: loss {actual:.7f}, the model's {loss:.7f}"
    found = gradients(model)
    if missing := set(expected) - set(found):
        return f"wrong: no gradient for {sorted(missing)[0]}"
    floor = ROUNDING * max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        gap = (found[name] - gradient).abs().max() / gradient.abs().max().clamp(min=floor)
        if not gap <= GRADIENT_TOLERANCE:
            return f"wrong: the gradient of {name} is off by {gap:.2e}"
    return "equal"


@pytest.mark.filterwarnings("ignore:headwater.torch.attach")
def test_classes_have_their_own_loss_and_gradients_or_are_refused(client):
    outcomes = tiny_models.Outcomes()
    classes = tiny_models.causal_lm_classes()
    gc.freeze()  # as conftest.py does: the classes' modules are imported now
    for cls in classes:
        name = cls.__name__
        with contextlib.ExitStack() as heads:
            try:
                model = tiny_models.build(cls)
                loss, expected = stock(model)
                remote = attach_remote_head(model, HeadwaterConfig(client=client, head="sweep"))
                heads.callback(remote.head.delete, force=True)
                outcomes.add(name, compare(model, remote, loss, expected))
                detach_remote_head(model)
            except tiny_models.NotBuilt as reason:
                outcomes.add(name, str(reason))
            except NotRun as reason:
                outcomes.add(name, f"not run: {reason}")
            except headwater.InvalidArgumentError as error:
                outcomes.add(name, f"refused: {error}")
            except Exception as error:
                outcomes.add(name, f"wrong: {type(error).__name__}: {error}")

    print(outcomes)
    assert not outcomes["wrong"]
    if outcomes.complete:
        assert len(outcomes["equal"]) >= AT_LEAST_EQUAL
