"""SmolLM2-135M-Instruct, tied, 49152 tokens: trained on real text through the stock Trainer and with its head on a server."""

import copy
import math

import peft
import pytest
import torch
import transformers
from tiny_trainer import Curve, make_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer

from headwater.transformers import HeadwaterConfig

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LOSS_TOLERANCE = 1e-5  # relative, at every step
FIRST_LOSS_TOLERANCE = 1e-6  # relative, against stock with its head in fp64


@pytest.fixture(scope="module")
def pretrained(smollm2):
    transformers.logging.disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(smollm2, gguf_file=GGUF, dtype=torch.float32)
    # What was loaded calls itself quantised, although its weights are float32.
    config = copy.deepcopy(loaded.config)
    config.quantization_config = None
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return model, AutoTokenizer.from_pretrained(smollm2, gguf_file=GGUF)


def texts(tokenizer, length: int) -> list[dict[str, torch.Tensor]]:
    """Sequences of this project's own pages."""
    import pathlib

    root = pathlib.Path(__file__).parents[2]
    pages = [root / "docs" / name for name in ("concepts.md", "math.md", "operations.md")]
    ids = tokenizer("\n".join(page.read_text() for page in pages))["input_ids"]
    rows = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


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
    trainer = make_trainer(
        folder,
        model,
        config,
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


def exact_first_loss(model, data, sequences, folder) -> float:
    """The first step's loss of the stock Trainer, with the head and its loss in fp64."""
    trainer = make_trainer(folder, model, train_dataset=data[:-4], per_device_train_batch_size=sequences)
    batches = iter(trainer.get_train_dataloader())
    total, count = 0.0, 0
    for _ in range(2):
        batch = next(batches)
        with torch.no_grad():
            rows = model.base_model(input_ids=batch["input_ids"]).last_hidden_state[:, :-1].double()
            logits = rows @ model.get_output_embeddings().weight.double().T
            targets = batch["labels"][:, 1:]
            total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
            count += targets.numel()
    return total / count


def check(client, pretrained, kind, steps, length, sequences, folder):
    model, tokenizer = pretrained
    data = texts(tokenizer, length)
    exact = exact_first_loss(variant(model, "tied"), data, sequences, folder) if kind == "tied" else math.nan
    expected, stock = curve(variant(model, kind), data, steps, sequences, folder)
    config = HeadwaterConfig(client=client, head=f"smollm2-{kind}-{length}")
    found, trainer = curve(variant(model, kind), data, steps, sequences, folder, config)

    print(f"{kind}: stock {expected.losses[0]:.7f} ... {expected.losses[-1]:.7f}, largest difference {found.gap(expected):.2e}")
    assert len(found.losses) == steps
    if kind == "tied":
        print(f"step 0 against fp64: stock {expected.losses[0] - exact:+.2e}, Headwater {found.losses[0] - exact:+.2e}")
        assert abs(found.losses[0] - exact) <= FIRST_LOSS_TOLERANCE * abs(exact)
    for ours, theirs in zip([*found.losses, found.evaluation], [*expected.losses, expected.evaluation], strict=True):
        assert abs(ours - theirs) <= LOSS_TOLERANCE * theirs
    trainer.save_model(folder / kind)
    ids = data[-1]["input_ids"][None, :24]
    expected_tokens = stock.model.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(trainer.model.generate(input_ids=ids, max_new_tokens=8, do_sample=False), expected_tokens)
    if kind != "lora":
        loaded = AutoModelForCausalLM.from_pretrained(folder / kind)
        assert torch.equal(loaded(ids).logits, trainer.model(ids).logits)
    return data, expected


def test_curve_of_a_real_model(client, pretrained, tmp_path):
    check(client, pretrained, "tied", steps=12, length=64, sequences=1, folder=tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["tied", "untied", "lora"])
def test_longer_curves_of_a_real_model(client, pretrained, tmp_path, kind):
    data, expected = check(client, pretrained, kind, steps=30, length=128, sequences=2, folder=tmp_path)
    if kind == "tied":
        other = variant(pretrained[0], kind)
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1 + 6e-8 * torch.randn_like(parameter))
        drift, _ = curve(other, data, 30, 2, tmp_path)
        print(f"stock against itself with weights off by 6e-8: {drift.gap(expected):.2e}")
