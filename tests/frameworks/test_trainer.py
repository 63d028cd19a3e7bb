"""The Trainer with its head on a server: the curve, the weights and the files of the Trainer without."""

import functools
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load
from tiny_trainer import STEPS, arguments, curve_of, examples, gap_of_weights, make_trainer, tiny_model, train
from transformers import AutoModelForCausalLM, Trainer

import headwater
from headwater.transformers import (
    AutoHeadwaterForCausalLM,
    HeadwaterCallback,
    HeadwaterConfig,
    detach_remote_head,
    local_lm_head,
    setup_trainer,
)

ENVIRONMENTS = ("newest", "oldest")
# PyTorch, datasets or the server decides the rule, and both environments have one version of these.
one_version = pytest.mark.long(environments=("oldest",))

LOSS_TOLERANCE = 1e-5  # absolute, of losses of size 5
WEIGHT_TOLERANCE = 2e-4  # AdamW divides by the size of gradients that are nearly 0


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # Trainers make the folder that they are given, even where they write nothing
    # transformers 4.56 leaves the precision of one Trainer there, for those that follow.
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")


@pytest.fixture
def config(client, request):
    """A head of the test's own."""
    name = "".join(c if c.isalnum() else "-" for c in request.node.name.lower()).strip("-")
    return HeadwaterConfig(client=client, head=name[-60:].strip("-"))


def with_(config, **options):
    return HeadwaterConfig(**{**vars(config), **options})


@pytest.fixture(scope="module")
def stock():
    """The Trainer without a head, by whether the weight is tied."""
    return {tied: train(tiny_model(tied)) for tied in (False, True)}


# ---- the curve -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("optimizer", ["auto", "torch"])
def test_curve_is_that_of_the_stock_trainer(config, stock, tied, optimizer):
    curve, model = train(tiny_model(tied), with_(config, optimizer=optimizer))

    expected, stock_model = stock[tied]
    print(f"tied {tied}, optimizer {optimizer}: losses differ by at most {curve.gap(expected):.2e}")
    assert len(curve.losses) == STEPS
    assert curve.gap(expected) <= LOSS_TOLERANCE
    assert curve.norms == pytest.approx(expected.norms, abs=1e-4)
    assert curve.rates == expected.rates
    assert gap_of_weights(model, stock_model) <= WEIGHT_TOLERANCE
    if not tied and optimizer == "auto":
        assert not model.lm_head.weight.requires_grad


def test_callback_among_the_trainers_own_does_it_all(config, stock):
    curve, _ = train(callbacks=[HeadwaterCallback(config)])
    assert curve.gap(stock[False][0]) <= LOSS_TOLERANCE


@pytest.mark.parametrize(
    "options",
    [
        {"optim": "sgd", "learning_rate": 0.5},
        {"max_grad_norm": 0.0},
        {"gradient_accumulation_steps": 3, "max_steps": 7, "num_train_epochs": 1},
        {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 4},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        pytest.param({"torch_compile": True, "torch_compile_backend": "eager"}, marks=one_version),
        {"dataloader_num_workers": 2},
        {"average_tokens_across_devices": False},
    ],
    ids=str,
)
def test_options_of_the_trainer_keep_the_curve(config, options):
    expected, _ = train(**options)
    curve, _ = train(config=config, **options)
    assert curve.gap(expected) <= LOSS_TOLERANCE
    if options.get("optim") != "sgd":
        assert curve.norms == pytest.approx(expected.norms, abs=1e-4)


def test_accuracy_and_entropy_are_logged_over_the_tokens_since_the_last_log(config):
    sums = torch.zeros(3, dtype=torch.float64)

    class Own(Trainer):
        """The stock Trainer, which adds up what its logits say."""

        def compute_loss(self, model, inputs, **kwargs):
            loss, output = super().compute_loss(model, inputs, **{**kwargs, "return_outputs": True})
            valid = inputs["labels"][:, 1:] != -100
            logits, targets = output.logits[:, :-1][valid].detach().double(), inputs["labels"][:, 1:][valid]
            sums.add_(torch.stack([(logits.argmax(-1) == targets).sum(), entropies(logits).sum(), valid.sum()]))
            return loss

        def log(self, logs, *args, **kwargs):
            if "loss" in logs:
                expected.append((sums[:2] / sums[2]).tolist())
                sums.zero_()
            super().log(logs, *args, **kwargs)

    expected = []
    make_trainer("unused", trainer_class=Own, logging_steps=3).train()
    trainer = make_trainer("unused", config=with_(config, outputs=("token_accuracy", "entropy")), logging_steps=3)
    trainer.train()

    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == len(expected) == STEPS // 3
    assert [log["token_accuracy"] for log in logs] == pytest.approx([accuracy for accuracy, _ in expected], abs=1e-9)
    assert [log["entropy"] for log in logs] == pytest.approx([entropy for _, entropy in expected], abs=LOSS_TOLERANCE)


def entropies(logits):
    log_probabilities = logits.log_softmax(-1)
    return -(log_probabilities.exp() * log_probabilities).sum(-1)


def lora(model, **options):
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options))


@pytest.mark.parametrize("tied", [False, True])
def test_lora_trains_over_a_frozen_head(config, tied):
    expected, stock_model = train(lora(tiny_model(tied)))
    curve, model = train(lora(tiny_model(tied)), config)

    assert curve.gap(expected) <= LOSS_TOLERANCE
    assert curve.norms == pytest.approx(expected.norms, abs=1e-4)
    assert gap_of_weights(model, stock_model) <= WEIGHT_TOLERANCE
    head = config.client.head(config.head)
    assert not head.spec.trainable


def test_modules_to_save_train_the_head(config, tmp_path):
    expected, stock_model = train(lora(tiny_model(), modules_to_save=["lm_head"]))
    curve, model = train(lora(tiny_model(), modules_to_save=["lm_head"]), config)

    assert curve.gap(expected) <= LOSS_TOLERANCE
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(tiny_model(), tmp_path)
    ids = examples(1)[0]["input_ids"][None]
    assert torch.allclose(loaded(ids).logits, stock_model(ids).logits, atol=1e-3)


def test_several_adapters_share_the_frozen_head(config):
    def two():
        model = lora(tiny_model())
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
        model.set_adapter("other")
        return model

    torch.manual_seed(5)
    expected, _ = train(two())
    curve, _ = train(two(), config)
    assert curve.gap(expected) <= LOSS_TOLERANCE


def test_mixture_of_experts_adds_its_routers_loss(config):
    def mixture():
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        return transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                **sizes,
                intermediate_size=32,
                vocab_size=97,
                num_local_experts=4,
                output_router_logits=True,
                router_aux_loss_coef=0.5,
            )
        )

    expected, _ = train(mixture(), max_steps=4)
    curve, _ = train(mixture(), config, max_steps=4)
    assert curve.gap(expected) <= LOSS_TOLERANCE


def test_ragged_stream_and_a_batch_without_targets(config):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            data = examples(13)
            for example in data[4:6]:  # a whole micro-batch
                example["labels"][:] = -100
            return iter(data)

    options = {"train_dataset": Stream(), "max_steps": 5}
    expected, _ = train(**options)
    curve, _ = train(config=config, **options)
    assert curve.gap(expected) <= LOSS_TOLERANCE


def test_padding_free_batches(config):
    collator = transformers.DataCollatorWithFlattening(return_position_ids=True)
    data = [{name: values.tolist() for name, values in example.items()} for example in examples()]
    options = {"train_dataset": data, "eval_dataset": data[:8], "data_collator": collator, "max_steps": 4}
    expected, _ = train(**options)
    curve, _ = train(config=config, **options)
    assert curve.gap(expected) <= LOSS_TOLERANCE


def test_batch_size_is_found_after_running_out_of_memory(config, monkeypatch):
    class Small(Trainer):
        def training_step(self, *args, **kwargs):
            if self._train_batch_size > 2 and self.state.global_step == 2:
                raise RuntimeError("CUDA out of memory. (as if)")
            return super().training_step(*args, **kwargs)

    options = {"trainer_class": Small, "per_device_train_batch_size": 4, "auto_find_batch_size": True}
    expected, _ = train(**options)
    curve, _ = train(config=config, **options)
    assert curve.gap(expected) <= LOSS_TOLERANCE


# ---- checkpoints -----------------------------------------------------------------------------------------------------------


class Death(Exception):
    """The trainer is gone."""


class DiesAt(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Death


@pytest.mark.parametrize("kind", ["served", "torch", "tied"])
def test_resumed_run_has_the_same_curve(config, stock, tmp_path, kind):
    tied = kind == "tied"
    config = with_(config, optimizer="torch" if kind == "torch" else "auto")
    options = {"save_strategy": "steps", "save_steps": 4}
    with pytest.raises(Death):
        train(tiny_model(tied), config, folder=tmp_path, callbacks=[DiesAt(7)], **options)

    curve, model = train(tiny_model(tied), config, resume=True, folder=tmp_path, **options)

    expected, stock_model = stock[tied]
    assert curve.gap(expected) <= LOSS_TOLERANCE  # the Trainer brings the log of the first 4 steps back
    assert gap_of_weights(model, stock_model) <= WEIGHT_TOLERANCE


@one_version
def test_resuming_a_head_that_is_elsewhere_is_refused(config, tmp_path):
    train(config=config, folder=tmp_path, save_strategy="steps", save_steps=4)
    shutil.copytree(tmp_path / "checkpoint-4", tmp_path / "checkpoint-5")
    state = tmp_path / "checkpoint-5/trainer_state.json"
    state.write_text(state.read_text().replace('"global_step": 4,', '"global_step": 5,'))

    with pytest.raises(headwater.StepMismatchError, match=r"stands at step 12.*step-4=4"):
        train(config=config, folder=tmp_path, resume=str(tmp_path / "checkpoint-5"))
    # A fresh run over a head that an earlier one has trained.
    with pytest.raises(headwater.StepMismatchError, match="stands at step 12, expected_step is 0"):
        train(config=config, folder=tmp_path)
    train(config=with_(config, if_exists="replace"), folder=tmp_path, max_steps=1)


@pytest.mark.parametrize("kind", ["served", "tied"])
def test_best_model_is_loaded_at_the_end(config, tmp_path, kind):
    options = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
        "save_total_limit": 1,
        "learning_rate": 5e-2,  # gets worse later on
    }
    tied = kind == "tied"
    expected, stock_model = train(tiny_model(tied), folder=tmp_path / "stock", **options)
    curve, model = train(tiny_model(tied), config, folder=tmp_path / "ours", **options)

    assert curve.evaluation == pytest.approx(expected.evaluation, abs=1e-4)
    assert gap_of_weights(model, stock_model) <= 10 * WEIGHT_TOLERANCE
    kept = {path.name for path in (tmp_path / "ours").glob("checkpoint-*")}
    assert kept == {path.name for path in (tmp_path / "stock").glob("checkpoint-*")}
    assert all(torch.isfinite(values).all() for values in model.state_dict().values())


def test_saved_model_is_the_trained_one(config, tmp_path):
    trainer = make_trainer(tmp_path, config=config, save_strategy="steps", save_steps=6, save_only_model=True)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    trainer.model.save_pretrained(tmp_path / "given", state_dict=dict(trainer.model.state_dict()))
    trainer.model.save_pretrained(tmp_path / "sharded", max_shard_size="10KB")
    trained = config.client.head(config.head).weight()

    ids = examples(2, seed=9)[0]["input_ids"][None]
    logits = trainer.model(ids).logits
    for name in ("saved", "given", "sharded", f"checkpoint-{STEPS}"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert np.array_equal(loaded.lm_head.weight.detach().numpy(), trained), name
        assert torch.equal(loaded(ids).logits, logits), name
    half_way = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-6")
    assert not np.array_equal(half_way.lm_head.weight.detach().numpy(), trained)


class Hub(transformers.TrainerCallback):
    """A stand-in for the Hub: `pushed` has the layer's weight in each folder that was uploaded, by its commit's message.

    An upload that runs beside the training reads its folder when the next step has ended.
    """

    def __init__(self, monkeypatch):
        self.pushed, self._step_ended, self._threads = {}, threading.Event(), ThreadPoolExecutor(1)
        monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda *_, **__: SimpleNamespace(repo_id="someone/tiny"))
        monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", lambda _, **given: self.upload_folder(**given))
        # transformers 4.56 has imported them by name.
        monkeypatch.setattr(transformers.trainer, "create_repo", huggingface_hub.HfApi().create_repo, raising=False)
        monkeypatch.setattr(transformers.trainer, "upload_folder", self.upload_folder, raising=False)

    def upload_folder(self, *, folder_path, commit_message, run_as_future=False, **_):
        if not run_as_future:
            return self._read(folder_path, commit_message)
        self._step_ended.clear()
        return self._threads.submit(lambda: self._step_ended.wait(60) and self._read(folder_path, commit_message))

    def _read(self, folder, message):
        # Read, not mapped: the next checkpoint is written over the file.
        self.pushed[message] = load(Path(folder, "model.safetensors").read_bytes())["lm_head.weight"].numpy()

    def on_step_end(self, args, state, control, **kwargs):
        self._step_ended.set()

    def on_train_end(self, args, state, control, **kwargs):
        self._step_ended.set()


def test_hub_is_pushed_the_trained_weight_beside_the_training(config, tmp_path, monkeypatch):
    hub, trained = Hub(monkeypatch), {}

    class Weights(transformers.TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            trained[state.global_step] = config.client.head(config.head).weight()

    options = {"push_to_hub": True, "hub_strategy": "checkpoint", "save_strategy": "steps", "save_steps": 6}
    trainer = make_trainer(tmp_path, config=config, callbacks=[hub, Weights()], **options)
    trainer.train()
    trainer.push_to_hub()

    steps = {f"Training in progress, step {step}{what}": trained[step] for step in (6, 12) for what in ("", ", checkpoint")}
    expected = {**steps, "End of training": trained[12]}
    assert hub.pushed.keys() == expected.keys()
    for message, weight in expected.items():
        assert np.array_equal(hub.pushed[message], weight), message
    assert not np.array_equal(trained[6], trained[12])


@pytest.mark.parametrize("keeps_optimizer", [True, False])
def test_second_training_goes_on_as_the_stock_trainers(config, keeps_optimizer):
    def twice(config, keeps_optimizer):
        trainer = make_trainer("unused", config=config)
        trainer.train()
        if not keeps_optimizer:
            trainer.optimizer = None
        trainer.train()
        return curve_of(trainer)

    expected, curve = twice(None, keeps_optimizer), twice(config, keeps_optimizer)
    assert curve.gap(expected) <= LOSS_TOLERANCE


# ---- evaluation and generation ---------------------------------------------------------------------------------------------


def accuracy(prediction, compute_result=True):
    tokens = prediction.predictions
    tokens = tokens.argmax(-1) if tokens.ndim == 3 else tokens
    labels = prediction.label_ids[:, 1:]
    return {"accuracy": float((tokens[:, :-1] == labels)[labels != -100].mean())}


def batched_accuracy():
    seen = []

    def compute(prediction, compute_result):
        seen.append((prediction.predictions.cpu(), prediction.label_ids.cpu()))
        if not compute_result:
            return None
        tokens, labels = (torch.cat(part) for part in zip(*seen, strict=True))
        seen.clear()
        tokens = tokens.argmax(-1) if tokens.ndim == 3 else tokens
        return {"accuracy": float((tokens[:, :-1] == labels[:, 1:])[labels[:, 1:] != -100].float().mean())}

    return compute


@pytest.mark.parametrize("batched", [False, True])
def test_metrics_and_predictions_are_those_of_the_stock_trainer(config, batched):
    def results(config):
        options = {"batch_eval_metrics": True, "compute_metrics": batched_accuracy()} if batched else {"compute_metrics": accuracy}
        trainer = make_trainer("unused", config=config, **options)
        before = trainer.evaluate()
        trainer.train()
        return before, trainer.evaluate(), trainer.predict(examples(8, seed=2))

    (before, after, predicted), (own_before, own_after, own_predicted) = results(None), results(config)
    for expected, metrics in ((before, own_before), (after, own_after)):
        assert metrics["eval_loss"] == pytest.approx(expected["eval_loss"], abs=LOSS_TOLERANCE)
        assert metrics["eval_accuracy"] == expected["eval_accuracy"]
    assert own_predicted.predictions.shape == (8, 16)
    assert np.array_equal(own_predicted.predictions, predicted.predictions.argmax(-1))
    assert np.array_equal(own_predicted.label_ids, predicted.label_ids)


def test_generation_uses_the_trained_weight(config):
    generated = []

    class Generates(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 5:
                with pytest.raises(headwater.FailedPreconditionError, match="local_lm_head"):
                    model.generate(ids, max_new_tokens=4, do_sample=False)
                with local_lm_head(model):
                    generated.append(model.generate(ids, max_new_tokens=4, do_sample=False))

    ids = examples(1, seed=4)[0]["input_ids"][None]
    curve, model = train(config=config, callbacks=[Generates()])
    after = model.generate(ids, max_new_tokens=8, do_sample=False)  # a model that was trained is whole

    class Stock(Generates):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 5:
                generated.append(model.generate(ids, max_new_tokens=4, do_sample=False))

    expected, stock_model = train(callbacks=[Stock()])
    assert curve.gap(expected) <= LOSS_TOLERANCE
    assert torch.equal(generated[0], generated[1])
    assert torch.equal(after, stock_model.generate(ids, max_new_tokens=8, do_sample=False))


# ---- undoing, and what is refused ------------------------------------------------------------------------------------------


def test_everything_can_be_undone(config, stock):
    trainer = make_trainer("unused", config=config)
    callback = trainer.callback_handler.callbacks[0]
    trainer.train()
    callback.undo()
    detach_remote_head(trainer.model)

    plain = make_trainer("unused")
    assert trainer.callback_handler.callbacks.__len__() == plain.callback_handler.callbacks.__len__()
    for ours, theirs in ((trainer, plain), (trainer.accelerator, plain.accelerator)):
        own = {name for name, value in vars(ours).items() if callable(value)} - vars(theirs).keys()
        assert not {name for name in own if "clip" in name or "norm" in name or "save" in name}
    for module in trainer.model.modules():
        assert not {"forward", "save_pretrained", "_loss_function", "_headwater_patch"} & vars(module).keys()
    assert trainer.model.lm_head.weight.requires_grad
    assert gap_of_weights(trainer.model, stock[False][1]) <= WEIGHT_TOLERANCE
    ids = examples(1)[0]["input_ids"][None]
    assert trainer.model(ids, labels=ids).logits.shape == (1, 16, 97)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"compute_loss_func": lambda outputs, labels, num_items_in_batch=None: outputs.logits.sum()}, "compute_loss_func"),
        ({"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}, "preprocess_logits_for_metrics"),
        ({"optim": "adafactor"}, "optim"),
        ({"optimizer_cls_and_kwargs": (torch.optim.RMSprop, {})}, "optimizer_cls_and_kwargs"),
        ({"model_init": lambda: tiny_model()}, "model_init"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_option_is_refused_by_name_before_training(config, options, named):
    model_init = options.get("model_init")
    trainer = Trainer(
        model=None if model_init else tiny_model(),
        args=arguments("unused", **{name: value for name, value in options.items() if name in ("label_smoothing_factor", "optim")}),
        train_dataset=examples(4),
        **{name: value for name, value in options.items() if name not in ("label_smoothing_factor", "optim")},
    )
    with pytest.raises(headwater.InvalidArgumentError, match=named):
        setup_trainer(trainer, config)
    assert config.head not in [info.name.rpartition("/")[2] for info in config.client.heads()]


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        ("accelerator.state.parallelism_config", SimpleNamespace(cp_size=2), "cp_size"),
        ("accelerator.state.parallelism_config", SimpleNamespace(cp_size=1, sp_size=2), "sp_size"),
        ("accelerator.state.parallelism_config", SimpleNamespace(tp_size=2), "tp_size"),
        ("is_fsdp_enabled", True, "fsdp"),
        ("args._n_gpu", 2, "n_gpu"),
        ("args.use_liger_kernel", True, "use_liger_kernel"),
    ],
)
def test_setting_that_a_machine_here_cannot_have_is_refused(config, monkeypatch, place, value, named):
    trainer = make_trainer("unused")
    *owners, name = place.split(".")
    monkeypatch.setattr(functools.reduce(getattr, owners, trainer), name, value, raising=False)
    with pytest.raises(headwater.InvalidArgumentError, match=named):
        setup_trainer(trainer, config)


def test_prompt_learning_is_refused(config):
    model = peft.get_peft_model(tiny_model(), peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    with pytest.raises(headwater.InvalidArgumentError, match="peft_config"):
        make_trainer("unused", model, config)


def test_lora_on_the_head_is_refused(config):
    with pytest.raises(headwater.InvalidArgumentError, match="LoRA"):
        model = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM"))
        make_trainer("unused", model, config)


@one_version
def test_processes_that_fork_after_the_connection_are_of_no_harm(config):
    trainer = make_trainer("unused", config=config)
    data = datasets.Dataset.from_dict({"number": list(range(8))}).map(lambda row: {"twice": 2 * row["number"]}, num_proc=2)
    assert data["twice"][:] == list(range(0, 16, 2))
    trainer.train()
    assert trainer.state.global_step == STEPS


def test_learning_rates_by_group_need_the_group_to_be_named(config):
    def groups(model):
        body = list(model.model.parameters())
        return torch.optim.AdamW([{"params": body, "lr": 1e-2}, {"params": [model.lm_head.weight], "lr": 1e-3}], weight_decay=0.1)

    def run(config):
        model = tiny_model()
        optimizer = groups(model)
        return train(model, config, optimizers=(optimizer, None))

    with pytest.raises(headwater.InvalidArgumentError, match="param_group"):
        run(config)
    expected, stock_model = run(None)
    curve, model = run(with_(config, param_group=1, if_exists="replace"))
    assert curve.gap(expected) <= LOSS_TOLERANCE
    assert gap_of_weights(model, stock_model) <= WEIGHT_TOLERANCE


def test_head_has_the_settings_of_its_layers_group(config):
    def make(**options):
        model = tiny_model()
        groups = [{"params": model.model.parameters(), "weight_decay": 0.0}, {"params": model.lm_head.parameters(), **options}]
        make_trainer("unused", model, config, optimizers=(torch.optim.AdamW(groups, lr=1e-2), None))

    with pytest.raises(headwater.InvalidArgumentError, match="optimizers=AdamW"):
        make(maximize=True)
    make(weight_decay=0.3)
    assert config.client.head(config.head).spec.optimizer.weight_decay == 0.3


def test_loss_that_is_computed_elsewhere_is_noticed_at_the_first_step(config):
    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            labels = inputs.pop("labels")
            logits = model(**inputs).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return (loss, {"logits": logits}) if return_outputs else loss

    with pytest.raises(headwater.FailedPreconditionError, match=r"no loss of .* was computed"):
        train(config=config, trainer_class=Own)


@one_version
def test_second_trainer_on_one_head_fences_the_first(config):
    first = make_trainer("unused", config=config)

    class Intrudes(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                config.client.head(config.head).take()

    first.add_callback(Intrudes())
    with pytest.raises(headwater.EpochFencedError):
        first.train()


@one_version
def test_gradient_that_is_not_finite_updates_nothing(config):
    class Explodes(Trainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return loss * 1e38 * 1e38 if self.state.global_step == 3 else loss

    trainer = make_trainer("unused", config=config, trainer_class=Explodes)
    with pytest.raises(headwater.HeadwaterError):
        trainer.train()
    assert config.client.head(config.head).step == 3
    assert all(torch.isfinite(values).all() for values in trainer.model.state_dict().values())


# ---- the model's side ------------------------------------------------------------------------------------------------------


def test_environment_names_the_server(server, monkeypatch, tmp_path):
    tiny_model().save_pretrained(tmp_path / "Tiny Model")
    monkeypatch.setenv("HEADWATER_SERVER", server.address)
    monkeypatch.setenv("HEADWATER_TOKEN_FILE", str(tmp_path / "token"))
    (tmp_path / "token").write_text("secret\n")

    model = AutoHeadwaterForCausalLM.from_pretrained(tmp_path / "Tiny Model")
    batch = {name: values[None] for name, values in examples(1)[0].items()}
    with torch.no_grad():
        loss = model(**batch).loss
    assert float(loss) == pytest.approx(float(tiny_model()(**batch).loss), abs=LOSS_TOLERANCE)
    with headwater.connect(server.address) as client:
        assert any(info.name.endswith("/tiny-model") for info in client.heads())
