"""The Trainer in bf16 and fp16: what is computed in which type, the curve, and overflow, with a head on a server and without.

On a GPU with SmolLM2-135M, 30 steps; on a CPU, whose Trainers have no fp16, with the tiny model and what a GPU's Trainer sets.
"""

import contextlib
import copy
import math

import pytest
import torch
import transformers
from figure_rows import write_figures
from smollm2_model import load, texts
from tiny_trainer import ON_GPU, Curve, examples, make_trainer, tiny_model

from headwater.transformers import HeadwaterCallback, HeadwaterConfig

ENVIRONMENTS = ("newest", "gpu")
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def pretrained(request):
    """The model, its data, and what of the Trainer's settings depends on it."""
    if not ON_GPU:
        return tiny_model(tied=True), examples(64), {}
    model, tokenizer = load(request.getfixturevalue("smollm2"))
    options = {"max_steps": 30, "per_device_train_batch_size": 2, "learning_rate": 2e-4, "max_grad_norm": 1.0}
    return model, texts(tokenizer, 128), options


def variant(model, kind):
    """The model as it is, or with an output layer of its own, which the server trains."""
    model = copy.deepcopy(model)
    if kind == "untied":
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        model.config.tie_word_embeddings = False
    return model


@contextlib.contextmanager
def precision(trainer, name):
    """The Trainer in bf16 or fp16; it was made with what `arguments_for` says."""
    accelerator = trainer.accelerator
    if name == "fp16" and not ON_GPU:
        # Settings that accelerate makes for fp16, which it refuses on a CPU.
        state = accelerator.state
        accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu"), True
        before, state._mixed_precision = state._mixed_precision, "fp16"
        try:
            yield
        finally:
            state._mixed_precision = before
    else:
        assert accelerator.mixed_precision == name
        yield


def arguments_for(name):
    return {name: True} if ON_GPU or name == "bf16" else {}


class Watch(transformers.TrainerCallback):
    """Records each step: whether the body and the last layer have moved, and whether its scale overflowed."""

    def __init__(self, trainer):
        self._trainer = trainer
        self._last = self._values()
        self.moved: list[tuple[bool, bool]] = []
        self._scale = trainer.accelerator.scaler.get_scale()
        self.skipped: list[bool] = []

    def _values(self):
        remote = next(
            (call.remote for call in self._trainer.callback_handler.callbacks if isinstance(call, HeadwaterCallback)), None
        )
        if remote is not None:
            remote.pull_weight()
        model = self._trainer.model
        weights = model.model.layers[0].mlp.down_proj.weight, model.get_output_embeddings().weight
        return [weight.detach().clone() for weight in weights]

    def on_step_end(self, args, state, control, **kwargs):
        values = self._values()
        self.moved.append(tuple(not torch.equal(new, old) for new, old in zip(values, self._last, strict=True)))
        self._last = values
        # accelerate does not say so of a fused optimizer, which is called, and skips its update itself.
        scale = self._trainer.accelerator.scaler.get_scale()
        self.skipped.append(scale < self._scale)
        self._scale = scale


def run(pretrained, kind, name, folder, config=None, seed=3, scale=None, **options):
    """Trains; returns the losses, and the Trainer with its Watch."""
    model, data, settings = pretrained
    settings = {**settings, **arguments_for(name), **options, "seed": seed}
    trainer = make_trainer(folder, variant(model, kind), config, train_dataset=data[:-4], eval_dataset=data[-4:], **settings)
    with precision(trainer, name):
        if scale is not None:
            scaler = trainer.accelerator.scaler
            scaler.load_state_dict({**scaler.state_dict(), "scale": scale})
            trainer.watch = Watch(trainer)
            trainer.add_callback(trainer.watch)
        trainer.train()
        logs = [log for log in trainer.state.log_history if "loss" in log]
        curves = ([log[key] for log in logs] for key in ("loss", "grad_norm", "learning_rate"))
        return Curve(*curves, trainer.evaluate()["eval_loss"]), trainer


@pytest.mark.parametrize("kind", ["tied", "untied"])
@pytest.mark.parametrize("name", TYPES)
def test_curve_stays_within_what_seeds_differ_by(client, pretrained, tmp_path, kind, name):
    expected, _ = run(pretrained, kind, name, tmp_path)
    other, _ = run(pretrained, kind, name, tmp_path, seed=4)
    curve, _ = run(pretrained, kind, name, tmp_path, HeadwaterConfig(client=client, head=f"curve-{kind}-{name}"))

    gap, seeds = curve.gap(expected), other.gap(expected)
    print(f"{kind}, {name}: losses {expected.losses[0]:.4f} to {expected.losses[-1]:.4f}; Headwater differs from stock by at most")
    print(
        f"  {gap:.2e}, stock's seeds by {seeds:.2e};",
        *(f"{a - b:+.1e}" for a, b in zip(curve.losses, expected.losses, strict=True)),
    )
    model = "smollm2" if ON_GPU else "tiny"
    write_figures(
        (f"{model}_{kind}_{name}_to_stock", gap, "loss", seeds), (f"{model}_{kind}_{name}_seeds_of_stock", seeds, "loss", None)
    )
    assert gap <= seeds
    assert math.isfinite(gap) and min(curve.losses) < curve.losses[0]


@pytest.mark.parametrize("name", TYPES)
def test_products_and_rows_have_the_types_of_stock(client, pretrained, tmp_path, name):
    def types(trainer):
        """Sets of types: of the body's products, of the last layer's, and of the rows that a head is sent."""
        seen = {"body": set(), "layer": set(), "rows": set()}
        model = trainer.model
        model.model.layers[0].mlp.down_proj.register_forward_hook(lambda _, inputs, output: seen["body"].add(output.dtype))
        callback = trainer.callback_handler.callbacks[0]
        if isinstance(callback, HeadwaterCallback):
            callback.remote.loss_fn.register_forward_pre_hook(lambda _, inputs: seen["rows"].add(inputs[0].dtype))
        else:
            model.lm_head.register_forward_hook(lambda _, inputs, output: seen["layer"].add(output.dtype))
        with precision(trainer, name):
            trainer.train()
        return seen

    model, data, settings = pretrained
    settings = {**settings, **arguments_for(name), "max_steps": 2, "train_dataset": data}
    stock = types(make_trainer(tmp_path, variant(model, "untied"), **settings))
    config = HeadwaterConfig(client=client, head=f"types-{name}")
    found = types(make_trainer(tmp_path, variant(model, "untied"), config, **settings))
    assert stock == {"body": {TYPES[name]}, "layer": {TYPES[name]}, "rows": set()}
    assert found == {"body": {TYPES[name]}, "layer": set(), "rows": {TYPES[name]}}


@pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_torch_fused"])
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_a_scale_that_overflows_skips_body_and_head(client, pretrained, tmp_path, kind, optimizer):
    """A loss scale far above what fp16 holds is halved until it fits: the steps until then are skipped on both sides."""
    options = {"scale": 2.0**30, "max_steps": 24, "optim": optimizer}
    expected, stock = run(pretrained, kind, "fp16", tmp_path, **options)
    config = HeadwaterConfig(client=client, head=f"scale-{kind}-{optimizer.replace('_', '-')}")
    curve, trainer = run(pretrained, kind, "fp16", tmp_path, config, **options)

    skipped = trainer.watch.skipped
    gap = curve.gap(expected)
    print(f"{kind}: skipped {sum(skipped)} of {len(skipped)} steps, stock {sum(stock.watch.skipped)}; losses differ by {gap:.2e}")
    assert any(skipped) and not all(skipped)
    # Stock rounds the last layer's gradient to fp16 as well, which may overflow at a scale that the head's does not.
    assert abs(sum(skipped) - sum(stock.watch.skipped)) <= 2
    # A rate of 0 moves nothing, as at the end of a schedule.
    moved = [both for both, rate in zip(trainer.watch.moved, curve.rates, strict=True) if rate]
    assert moved == [(not skip, not skip) for skip, rate in zip(skipped, curve.rates, strict=True) if rate]
