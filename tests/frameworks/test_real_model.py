"""SmolLM2-135M-Instruct, tied, 49152 tokens: trained on real text through the stock Trainer and with its head on a server."""

import copy

import peft
import pytest
import torch
from smollm2_model import load, texts
from tiny_trainer import Curve, make_trainer
from transformers import AutoModelForCausalLM

from headwater.transformers import HeadwaterConfig

# Absolute, of the loss that the Trainer logs, against stock with its head in fp64: in fp32, stock itself is up to 1.4e-5 from that.
FIRST_TOLERANCE = 1e-6  # before the first update
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


def curve(model, data, steps, sequences, folder, config=None):
    max_norm = 0.1 if isinstance(model, peft.PeftModel) else 1.0
    trainer = make_trainer(
        folder,
        model,
        config,
        train_dataset=data[:-4],
        eval_dataset=data[-4:],
        max_steps=steps,
        per_device_train_batch_size=sequences,
        learning_rate=2e-4,
        max_grad_norm=max_norm,
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    found = Curve(
        *([log[name] for log in logs] for name in ("loss", "grad_norm", "learning_rate")), trainer.evaluate()["eval_loss"]
    )
    assert max(found.norms) > max_norm, "the gradients were never clipped"
    return found, trainer


def with_head_in_fp64(model):
    """The stock model, whose last layer and cross entropy compute in fp64; their gradients are rounded to fp32."""
    layer = model.get_output_embeddings()

    def forward(rows):
        return torch.nn.functional.linear(rows.double(), layer.weight.double())

    def loss(logits, labels, vocab_size, num_items_in_batch=None, **_):
        total = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return total / (labels[:, 1:].numel() if num_items_in_batch is None else num_items_in_batch)

    layer.forward = forward
    base = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    base.loss_function = loss
    return model


def moved(model):
    """The model with its weights off by fp32's rounding."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 6e-8 * torch.randn_like(parameter))
    return model


def gaps(losses, others) -> list[float]:
    return [ours - other for ours, other in zip(losses, others, strict=True)]


def check(client, pretrained, kind, steps, length, sequences, folder, beside_stock=False):
    """Trains with the head on a server and with it in fp64; beside_stock also as it is, for figures that are printed alone."""
    model, tokenizer = pretrained
    data = texts(tokenizer, length)
    exact, reference = curve(with_head_in_fp64(variant(model, kind)), data, steps, sequences, folder)
    config = HeadwaterConfig(client=client, head=f"smollm2-{kind}-{length}")
    found, trainer = curve(variant(model, kind), data, steps, sequences, folder, config)

    compared = {"Headwater to stock with its head in fp64": gaps(found.losses, exact.losses)}
    if beside_stock:
        stock, _ = curve(variant(model, kind), data, steps, sequences, folder)
        compared["stock to stock with its head in fp64"] = gaps(stock.losses, exact.losses)
        compared["Headwater to stock"] = gaps(found.losses, stock.losses)
        drift, _ = curve(moved(variant(model, kind)), data, steps, sequences, folder)
        compared["stock with weights off by 6e-8 to stock"] = gaps(drift.losses, stock.losses)
    for name, values in compared.items():
        print(f"{kind}: {name}: largest {max(map(abs, values)):.2e} of {exact.losses[0]:.2f};", *(f"{v:+.1e}" for v in values))
    assert len(found.losses) == steps
    assert found.losses[0] == pytest.approx(exact.losses[0], rel=0, abs=FIRST_TOLERANCE)
    assert found.losses == pytest.approx(exact.losses, rel=0, abs=LOSS_TOLERANCE)
    assert found.evaluation == pytest.approx(exact.evaluation, rel=0, abs=LOSS_TOLERANCE)
    trainer.save_model(folder / kind)
    ids = data[-1]["input_ids"][None, :24]
    expected_tokens = reference.model.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(trainer.model.generate(input_ids=ids, max_new_tokens=8, do_sample=False), expected_tokens)
    if kind != "lora":
        loaded = AutoModelForCausalLM.from_pretrained(folder / kind)
        assert torch.equal(loaded(ids).logits, trainer.model(ids).logits)


def test_curve_of_a_real_model(client, pretrained, tmp_path):
    check(client, pretrained, "tied", steps=3, length=64, sequences=1, folder=tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["tied", "untied", "lora"])
def test_longer_curves_of_a_real_model(client, pretrained, tmp_path, kind):
    check(client, pretrained, kind, steps=30, length=128, sequences=2, folder=tmp_path, beside_stock=True)
