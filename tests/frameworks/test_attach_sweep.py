"""Every class of transformers with an output head: attach() makes a head with the model's own loss, or refuses the model."""

import contextlib
import re

import pytest
import tiny_models
import torch
import torch.nn.functional as F

import headwater
import headwater.torch

AT_LEAST_BUILT = 350
AT_LEAST_RIGHT = 300
LOSS_TOLERANCE = 1e-5  # relative, in float32

# An option as an error names it: softcap=30.0, logit_scale=1 / 8.0.
NAMED_OPTION = re.compile(r"\b(softcap|logit_scale|valid_vocab_size)=(-?[\d.]+(?:e-?\d+)?)(?: / ([\d.]+))?")


class NotRun(Exception):
    """The model cannot compute a loss of ids alone; the text is the reason."""


def attach_as_told(client, name: str, model, **options):
    """Adds the options that errors name, as a user does, until attach() takes the model. Returns the head and the options."""
    layer = model.get_output_embeddings()
    while True:
        try:
            return headwater.torch.attach(client, name, layer, model=model, trainable=False, **options), options
        except headwater.InvalidArgumentError as error:
            named = {
                option: float(value) / float(divisor or 1)
                for option, value, divisor in NAMED_OPTION.findall(str(error))
                if option not in options
            }
            if not named:
                raise
            options = options | named


def run(model):
    """The model's own loss of a batch, its logits, the labels that belong to them, and the rows that its last layer gets."""
    ids, labels = tiny_models.batch()
    rows = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda module, args: rows.append(args[0].detach()))
    try:
        with torch.no_grad():
            output = model(input_ids=ids, labels=labels)
    except Exception as error:
        raise NotRun(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    finally:
        hook.remove()
    if output.get("loss") is None or output.get("logits") is None:
        raise NotRun("has no loss of its own, or no logits")
    if len(rows) != 1 or rows[0].shape[:2] != ids.shape:
        raise NotRun(f"the last layer got rows of {[tuple(part.shape) for part in rows]}")
    return output.loss.item(), output.logits.float(), labels, rows[0].float()


def cross_entropy(logits, labels) -> float:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()


def is_close(value: float, expected: float) -> bool:
    return abs(value - expected) <= LOSS_TOLERANCE * abs(expected)


def check_loss(head, model) -> str:
    """Compares the head's loss with the model's: "right", or "wrong: ..."."""
    own, logits, labels, rows = run(model)
    pairs = {"shifted": (logits[:, :-1], rows[:, :-1], labels[:, 1:]), "not shifted": (logits, rows, labels)}
    # Some classes smooth their loss, or weight it; their logits are compared then.
    expected, (_, hidden, targets) = next(
        ((own, pair) for pair in pairs.values() if is_close(cross_entropy(pair[0], pair[2]), own)),
        (cross_entropy(*pairs["shifted"][::2]), pairs["shifted"]),
    )
    loss = headwater.torch.CrossEntropyLoss(head)(hidden, targets).item()
    if is_close(loss, expected):
        return "right"
    return f"wrong: loss {loss:.6f}, the model's {expected:.6f}, softcap={head.spec.softcap} logit_scale={head.spec.logit_scale}"


@pytest.mark.long  # test_transformers_classes.py trains those for causal LMs in every run
def test_attached_models_have_their_own_loss_or_are_refused(client):
    outcomes, alarms = tiny_models.Outcomes(), tiny_models.Outcomes()
    for cls in tiny_models.output_classes():
        name = cls.__name__
        with contextlib.ExitStack() as heads:
            try:
                model = tiny_models.build(cls).requires_grad_(False)
                head, options = attach_as_told(client, "sweep", model)
                heads.callback(head.delete, force=True)
                outcomes.add(name, check_loss(head, model))
            except tiny_models.NotBuilt as reason:
                outcomes.add(name, str(reason))
                continue
            except NotRun as reason:
                outcomes.add(name, f"not run: {reason}")
            except headwater.InvalidArgumentError as error:
                outcomes.add(name, f"refused: {error}")
                continue
            # A class that passes in float32 also passes in bfloat16.
            try:
                bf16, _ = attach_as_told(client, "sweep-bf16", model.to(torch.bfloat16), **options)
                heads.callback(bf16.delete, force=True)
                alarms.add(name, "right in bfloat16")
            except headwater.InvalidArgumentError as error:
                alarms.add(name, f"false alarm: {error}")

    print(outcomes, alarms, sep="\n")
    assert not outcomes["wrong"]
    assert not alarms["false alarm"]
    if outcomes.complete:
        assert sum(len(outcomes[kind]) for kind in ("right", "refused", "not run")) >= AT_LEAST_BUILT
        assert len(outcomes["right"]) >= AT_LEAST_RIGHT
