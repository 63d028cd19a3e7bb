"""SmolLM2-135M-Instruct, tied, 49152 tokens: trained on real text through the stock Trainer and with its head on a server."""

import copy

import peft
import pytest
import torch
import transformers
from smollm2_model import load, texts
from tiny_trainer import Curve, make_trainer
from transformers import AutoModelForCausalLM

from headwater.transformers import HeadwaterConfig

# Relative to stock's loss with its head in fp64 over the same rows: stock's own fp32 loss is off by 1.5e-6 of it.
EARLY_TOLERANCE = 1e-6  # before the first update and after it: gradients, clipping, learning rate and optimizer are right
LOSS_TOLERANCE = 1e-5  # at every step


@pytest.fixture(scope="module")
def pretrained(smollm2):
    return load(smollm2)


def variant(model, kind: str):
    """The model as it is, with an output layer of its own, or under LoRA."""
    model = copy.deepcopy(model)
    if kind == "untied":
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        model.config.tie_word_embeddings = False
    if kind == "lora":
        torch.manual_seed(0)
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    return model


def curve(model, data, steps, sequences, folder, config=None, trainer_class=transformers.Trainer):
    trainer = make_trainer(
        folder,
        model,
        config,
        trainer_class,
        train_dataset=data[:-4],
        eval_dataset=data[-4:],
        max_steps=steps,
        per_device_train_batch_size=sequences,
        learning_rate=2e-4,
        max_grad_norm=1.0,
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    found = Curve(
        *([log[name] for log in logs] for name in ("loss", "grad_norm", "learning_rate")), trainer.evaluate()["eval_loss"]
    )
    assert max(found.norms) > 1.0, "the gradients were never clipped"
    return found, trainer


class Exact(transformers.Trainer):
    """The stock Trainer. `exact` has each step's loss as it is where the head and its loss are computed in fp64."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        layer, rows = model.get_output_embeddings(), []
        hook = layer.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].detach()))
        result = super().compute_loss(model, inputs, *args, **kwargs)
        hook.remove()
        if model.training:
            with torch.no_grad():
                logits = rows[0][:, :-1].double() @ layer.weight.double().T
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"][:, 1:].flatten())
            vars(self).setdefault("micro_batches", []).append(loss.item())
        return result

    @property
    def exact(self) -> list[float]:
        # Two micro-batches of equal size in each step.
        return [sum(pair) / 2 for pair in zip(self.micro_batches[::2], self.micro_batches[1::2], strict=True)]


def moved(model):
    """The model with its weights off by fp32's rounding."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 6e-8 * torch.randn_like(parameter))
    return model


def gaps(losses, others) -> list[float]:
    return [ours - other for ours, other in zip(losses, others, strict=True)]


def check(client, pretrained, kind, steps, length, sequences, folder):
    model, tokenizer = pretrained
    data = texts(tokenizer, length)
    expected, stock = curve(variant(model, kind), data, steps, sequences, folder, trainer_class=Exact)
    drift, _ = curve(moved(variant(model, kind)), data, steps, sequences, folder)
    config = HeadwaterConfig(client=client, head=f"smollm2-{kind}-{length}")
    found, trainer = curve(variant(model, kind), data, steps, sequences, folder, config)

    to_exact = gaps(found.losses, stock.exact)
    for name, values in (
        ("Headwater to stock with its head in fp64", to_exact),
        ("stock to itself with its head in fp64", gaps(expected.losses, stock.exact)),
        ("Headwater to stock", gaps(found.losses, expected.losses)),
        ("stock to itself with weights off by 6e-8", gaps(drift.losses, expected.losses)),
    ):
        print(f"{kind}: {name}: largest {max(map(abs, values)):.2e} of {expected.losses[0]:.2f};", *(f"{v:+.1e}" for v in values))
    assert len(found.losses) == steps
    assert found.losses == pytest.approx(stock.exact, rel=LOSS_TOLERANCE)
    assert found.losses[:2] == pytest.approx(stock.exact[:2], rel=EARLY_TOLERANCE)
    assert found.evaluation == pytest.approx(expected.evaluation, rel=LOSS_TOLERANCE)
    trainer.save_model(folder / kind)
    ids = data[-1]["input_ids"][None, :24]
    expected_tokens = stock.model.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(trainer.model.generate(input_ids=ids, max_new_tokens=8, do_sample=False), expected_tokens)
    if kind != "lora":
        loaded = AutoModelForCausalLM.from_pretrained(folder / kind)
        assert torch.equal(loaded(ids).logits, trainer.model(ids).logits)


def test_curve_of_a_real_model(client, pretrained, tmp_path):
    check(client, pretrained, "tied", steps=12, length=64, sequences=1, folder=tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["tied", "untied", "lora"])
def test_longer_curves_of_a_real_model(client, pretrained, tmp_path, kind):
    check(client, pretrained, kind, steps=30, length=128, sequences=2, folder=tmp_path)
