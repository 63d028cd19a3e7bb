"""Which recipes `headwater.llamafactory` trains with a remote head, over modules in LLaMA-Factory's place.

LLaMA-Factory asks for logits, and drops Liger's fused loss, in each stage but pt and sft. The fork 360-LLaMA-Factory also computes
the loss from logits by itself where a sequence is on several ranks. tests/frameworks/test_llamafactory.py trains with the real one.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest

import headwater
import headwater.llamafactory

DEFAULTS = {"stage": "sft", "predict_with_generate": False, "do_train": True, "eval_strategy": "no"}


def module(name, **members):
    made = ModuleType(name)
    vars(made).update(members)
    return made


@pytest.fixture
def launch(monkeypatch):
    """A function of a recipe's options that runs the command; the callbacks of each training that it started."""
    trainings = []

    def run(**options):
        hparams = module(
            "llamafactory.hparams",
            read_args=lambda: options,
            get_ray_args=lambda given: SimpleNamespace(use_ray=False),
            get_train_args=lambda given: (SimpleNamespace(**DEFAULTS | given),),
        )
        tuner = module("llamafactory.train.tuner", run_exp=lambda given, callbacks: trainings.append(callbacks))
        callback = module("headwater.transformers", HeadwaterCallback=lambda: "the remote head")
        packages = (module("llamafactory"), module("llamafactory.train"))
        for stand_in in (*packages, hparams, tuner, callback):
            monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
        monkeypatch.setattr(sys, "argv", ["headwater.llamafactory"])
        headwater.llamafactory.main(["train", "recipe.yaml"])

    return SimpleNamespace(run=run, trainings=trainings)


@pytest.mark.parametrize("stage", ["pt", "sft"])
@pytest.mark.parametrize("accumulation", [1, 32])
def test_accumulation_keeps_the_remote_head(launch, stage, accumulation):
    launch.run(stage=stage, gradient_accumulation_steps=accumulation, sequence_parallel_size=1)
    assert launch.trainings == [["the remote head"]]


@pytest.mark.parametrize(
    "options",
    [
        {"stage": "rm"},
        {"stage": "ppo"},
        {"stage": "dpo"},
        {"stage": "kto"},
        {"compute_accuracy": True},
        {"sequence_parallel_size": 2},
    ],
    ids=str,
)
def test_recipes_that_need_logits_are_refused_by_name(launch, options):
    with pytest.raises(headwater.InvalidArgumentError, match=rf"\b{next(iter(options))}: "):
        launch.run(**options)
    assert launch.trainings == []
