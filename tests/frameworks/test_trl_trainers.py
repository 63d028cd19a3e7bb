"""TRL's own trainers over a remote head: the logs and the weights of the same trainers without Headwater."""

import functools
import json

import datasets
import pytest
import torch
import transformers
import trl
from peft import LoraConfig
from rank_runs import run_two_ranks
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl_runs import NUMBERS, SETTINGS, STEPS, check_equal, language_model, sentence, tokenizer, was_clipped

import headwater
import headwater.transformers
from headwater.trl import HeadwaterConfig, setup_trainer

ENVIRONMENTS = ("newest", "oldest")
# With another version of transformers alone, whose Trainer has tests of its own there.
pytestmark = pytest.mark.long(environments=("oldest",))

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


@functools.cache
def rows(kind, count=32):
    generator = torch.Generator().manual_seed(3)
    text = functools.partial(sentence, generator)
    made = {
        "text": lambda index: {"text": text()},
        "prompt": lambda index: {"prompt": text()},
        "completion": lambda index: {"prompt": text(), "completion": " " + text(), "label": index % 3 > 0},
        "pair": lambda index: {"prompt": text(), "chosen": " " + text(), "rejected": " " + text()},
    }[kind]
    return datasets.Dataset.from_list([made(index) for index in range(count)])


def reward(completions, **_):
    """Something that depends on every word."""
    return [sum(len(word) + int(word[-1], 36) % 5 for word in text.split()) / 10 for text in completions]


TRAINERS = {
    "sft": (SFTTrainer, SFTConfig, "text", {"eval_dataset": rows("text", 8)}),
    "dpo": (DPOTrainer, DPOConfig, "pair", {}),
    "kto": (KTOTrainer, KTOConfig, "completion", {}),
    "grpo": (GRPOTrainer, GRPOConfig, "prompt", {"reward_funcs": reward}),
    "rloo": (RLOOTrainer, RLOOConfig, "prompt", {"reward_funcs": reward}),
}
# Settings of trainers that generate.
GENERATES = {"num_generations": 2, "max_completion_length": 6, "per_device_train_batch_size": 4}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny model with an output layer of its own, and one whose embedding is its output layer."""
    folders = {}
    for name, tied in (("untied", False), ("tied", True)):
        folders[name] = tmp_path_factory.mktemp(name)
        language_model(tie_word_embeddings=tied).save_pretrained(folders[name])
        tokenizer().save_pretrained(folders[name])
    return folders


def made(kind, folder, output, peft_config=None, **settings):
    trainer, config, data, arguments = TRAINERS[kind]
    arguments = {name: settings.pop(name, value) for name, value in {**arguments, "compute_loss_func": None}.items()}
    if kind != "sft":
        del arguments["compute_loss_func"]
    if kind in ("dpo", "kto") and peft_config is None:
        arguments["ref_model"] = language_model(seed=1)  # at first it would be the policy, and every comparison a tie
    own = {"per_device_train_batch_size": 2, **(GENERATES if kind in ("grpo", "rloo") else {})}
    given = {name: settings.pop(name) for name in ("compute_metrics", "preprocess_logits_for_metrics") if name in settings}
    return trainer(
        model=str(folder),
        args=config(output_dir=str(output), **{**SETTINGS, **own, **settings}),
        train_dataset=rows(data),
        processing_class=tokenizer(),
        peft_config=peft_config,
        **arguments,
        **given,
    )


def served(trainer, client, **config):
    return setup_trainer(trainer, HeadwaterConfig(client=client, head=f"trained-{next(NUMBERS)}", **config))


@pytest.mark.parametrize(
    ("kind", "model", "settings", "config"),
    [
        ("sft", "untied", {"gradient_checkpointing": True, "eval_strategy": "steps", "eval_steps": 5, "eval_on_start": True}, {}),
        ("sft", "tied", {}, {}),
        ("sft", "untied", {"peft_config": LORA}, {}),
        ("sft", "untied", {"loss_type": "dft", "optim": "sgd", "learning_rate": 0.1}, {}),
        ("sft", "untied", {"packing": True, "packing_strategy": "wrapped", "max_length": 16}, {}),
        ("dpo", "untied", {}, {}),
        ("dpo", "untied", {"use_weighting": True, "precompute_ref_log_probs": True}, {}),
        ("dpo", "untied", {"peft_config": LORA}, {}),
        ("kto", "untied", {}, {}),
        ("kto", "untied", {}, {"optimizer": "torch"}),
        ("grpo", "untied", {"beta": 0.1, "temperature": 0.7, "num_iterations": 2, "entropy_coef": 0.01}, {}),
        ("grpo", "untied", {"peft_config": LORA, "cast_lm_head_to_fp32": True}, {}),
        ("rloo", "untied", {"beta": 0.1, "temperature": 0.7}, {}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_a_trainer_logs_and_learns_what_trl_alone_does(folders, tmp_path, client, kind, model, settings, config):
    stock = made(kind, folders[model], tmp_path / "stock", **settings)
    stock.train()
    ours = made(kind, folders[model], tmp_path / "ours", **settings)
    served(ours, client, **config)
    ours.train()
    check_equal(ours, stock)
    assert was_clipped(stock) or "use_weighting" in settings  # whose gradients are tiny
    assert ours.model.state_dict().keys() == stock.model.state_dict().keys()


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


RANKED = ("sft", "dpo")


@pytest.fixture(scope="module")
def two_ranks(folders, server, tmp_path_factory):
    """The folder with what two ranks have trained, by kind."""
    folder = tmp_path_factory.mktemp("ranks")
    run_two_ranks("rank_trl.py", folder, server.address, folder, folders["untied"], *RANKED)
    return folder


@pytest.mark.parametrize("kind", RANKED)
def test_two_ranks_learn_what_one_does_by_trl_alone(folders, two_ranks, tmp_path, kind):
    stock = made(kind, folders["untied"], tmp_path)
    stock.train()
    found, expected = json.loads((two_ranks / f"{kind}.json").read_text()), losses(stock)
    trained = transformers.AutoModelForCausalLM.from_pretrained(two_ranks / kind)
    assert len(found) == STEPS
    gap = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    print(f"two ranks, {kind}: losses differ by at most {gap:.2e}")
    assert found == pytest.approx(expected, abs=1e-4)
    for name, weight in trained.named_parameters():
        assert torch.allclose(weight, stock.model.get_parameter(name), rtol=1e-4, atol=1e-4), name


def test_completions_are_made_with_the_trained_weight(folders, tmp_path, client):
    """Also what vLLM would be sent: it reads the model's parameters within `_generate`."""
    trainer = made("grpo", folders["untied"], tmp_path, max_steps=4, steps_per_generation=2)
    generate, seen = trainer._generate, []

    def look(prompts):
        weight = trainer.model.lm_head.weight.detach().clone()
        seen.append((weight, torch.as_tensor(callback.remote.head.weight())))
        return generate(prompts)

    trainer._generate = look
    callback = served(trainer, client)
    trainer.train()
    assert len(seen) == 4 and not torch.equal(seen[0][0], seen[-1][0])
    assert all(torch.equal(here, there) for here, there in seen)


def test_a_run_is_saved_and_resumed_with_both_its_parts(folders, tmp_path, client, server):
    whole = made("dpo", folders["untied"], tmp_path / "whole")
    served(whole, client)
    whole.train()
    folder = tmp_path / "cut"
    with headwater.connect(server.address) as first:
        cut = made("dpo", folders["untied"], folder, save_strategy="steps", save_steps=6)
        setup_trainer(cut, HeadwaterConfig(client=first, head="resumed"))
        with pytest.raises(KeyboardInterrupt):
            cut.add_callback(_Interrupt())
            cut.train()
        again = made("dpo", folders["untied"], folder, save_strategy="steps", save_steps=6)
        setup_trainer(again, HeadwaterConfig(client=first, head="resumed"))
        again.train(resume_from_checkpoint=True)
    for name, weight in whole.model.named_parameters():
        assert torch.allclose(again.model.get_parameter(name), weight, rtol=1e-5, atol=1e-5), name
    again.save_model(tmp_path / "saved")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.allclose(loaded.lm_head.weight, whole.model.lm_head.weight, rtol=1e-5, atol=1e-5)


class _Interrupt(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 7:
            raise KeyboardInterrupt


def test_everything_can_be_undone(folders, tmp_path, client):
    trainer = made("dpo", folders["untied"], tmp_path)
    before = {id(module): module.forward for model in (trainer.model, trainer.ref_model) for module in model.modules()}
    hooks = set(vars(trainer))
    callback = served(trainer, client)
    callback.undo()
    for model in (trainer.model, trainer.ref_model):
        headwater.transformers.detach_remote_head(model)
        assert all(module.forward == before[id(module)] for module in model.modules())
    assert set(vars(trainer)) == hooks
    trainer.train()
    stock = made("dpo", folders["untied"], tmp_path)
    stock.train()
    check_equal(trainer, stock)


# ---- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        ("sft", {"compute_loss_func": lambda *_, **__: None}, "compute_loss_func"),
        ("sft", {"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ("sft", {"compute_metrics": lambda _: {}}, "compute_metrics"),
        ("sft", {"preprocess_logits_for_metrics": lambda *_: None}, "preprocess_logits_for_metrics"),
        ("dpo", {"sync_ref_model": True, "ref_model_sync_steps": 2}, "sync_ref_model"),
        ("kto", {"sync_ref_model": True, "ref_model_sync_steps": 2}, "sync_ref_model"),
    ],
)
def test_an_option_that_cannot_work_is_refused_by_its_name(folders, tmp_path, client, kind, settings, named):
    trainer = made(kind, folders["untied"], tmp_path, **settings)
    forward = trainer.model.forward
    with pytest.raises(headwater.InvalidArgumentError, match=named):
        served(trainer, client)
    assert trainer.model.forward == forward
    assert trainer.model.lm_head.weight.requires_grad


def test_a_reference_model_may_follow_a_body_over_a_frozen_head(folders, tmp_path, client):
    settings = {"sync_ref_model": True, "ref_model_sync_steps": 3, "ref_model_mixup_alpha": 0.5}
    runs = []
    for name in ("stock", "ours"):
        trainer = made("dpo", folders["untied"], tmp_path / name, **settings)
        trainer.ref_model.load_state_dict(language_model(seed=0).state_dict())
        trainer.model.lm_head.requires_grad_(False)
        runs.append(trainer)
    served(runs[1], client)
    for trainer in runs:
        trainer.train()
    check_equal(runs[1], runs[0], but=("rewards/accuracies",))  # at first the reference is the policy: ties


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("trl.RewardTrainer", "trains a score"),
        ("trl.DistillationTrainer", "RemoteDistillationTrainer"),
        ("trl.experimental.gkd.GKDTrainer", "not one of the trainers that read TRL's fused LM head"),
        ("trl.experimental.orpo.ORPOTrainer", "SFTTrainer, DPOTrainer, KTOTrainer, GRPOTrainer, RLOOTrainer"),
        ("transformers.Trainer", "headwater.transformers.setup_trainer"),
    ],
)
def test_another_trainer_is_refused_by_its_name(name, reason):
    module, _, attribute = name.rpartition(".")
    cls = getattr(
        transformers if module == "transformers" else trl if module == "trl" else __import__(module, fromlist=[""]), attribute
    )
    with pytest.raises(headwater.InvalidArgumentError, match=attribute) as raised:
        setup_trainer(object.__new__(cls))
    assert reason in str(raised.value)


def test_the_trainers_setup_of_transformers_finds_its_way_here(folders, tmp_path, client):
    class Own(SFTTrainer):
        """A subclass of a user's, without a loss of its own."""

    trainer = made("sft", folders["untied"], tmp_path, max_steps=2)
    trainer.__class__ = Own
    config = HeadwaterConfig(client=client, head=f"trained-{next(NUMBERS)}")
    headwater.transformers.setup_trainer(trainer, config).remote.head.info()
    trainer.train()
    assert "entropy" in trainer.state.log_history[0] and len(trainer.state.log_history) == 3
