"""Two ranks (gloo, CPU) under DeepSpeed's ZeRO 1 to 3 have the curve and the weights of one rank, or are refused by name."""

import json

import pytest
from rank_runs import run_two_ranks
from rank_trainer import model_of
from tiny_trainer import Curve, gap_of_weights, make_trainer, train
from transformers import AutoModelForCausalLM

import headwater
from headwater.transformers import HeadwaterConfig, setup_trainer

ENVIRONMENTS = ("deepspeed",)

STAGES = ("zero1", "zero2", "zero3")
TRAINED = ("served", "resumed", "lora", "partitioned")
KINDS = (*TRAINED, "tied", "torch", "ungathered", "fp16-stock", "fp16")
LOSS_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def stock():
    """Curve and model of stock transformers on one rank, without DeepSpeed."""
    runs = {kind: train(model_of(kind)) for kind in ("served", "lora")}
    return {kind: runs["lora" if kind == "lora" else "served"] for kind in TRAINED}


@pytest.fixture(scope="module")
def folder(server, tmp_path_factory):
    """The files that rank 0 of two wrote, by stage and kind."""
    folder = tmp_path_factory.mktemp("ranks")
    # One pair of processes for all: to start one takes longer than to train.
    for stages in ("zero1+zero2", "zero3"):
        kinds = (kind for kind in KINDS if stages == "zero3" or kind not in ("partitioned", "ungathered"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DS_ACCELERATOR", "cpu")
            run_two_ranks("rank_trainer.py", folder, server.address, folder, stages, *kinds)
    return folder


@pytest.mark.parametrize(
    ("stage", "kind"), [*((stage, kind) for stage in STAGES for kind in ("served", "resumed", "lora")), ("zero3", "partitioned")]
)
def test_two_ranks_have_the_curve_of_one(folder, stock, stage, kind):
    curve = Curve(**json.loads((folder / f"{stage}-{kind}.json").read_text())["curve"])
    expected, stock_model = stock[kind]
    print(f"{stage}, {kind}: losses differ by at most {curve.gap(expected):.2e}")
    assert curve.gap(expected) <= LOSS_TOLERANCE
    assert curve.norms == pytest.approx(expected.norms, abs=1e-4)
    assert curve.rates == pytest.approx(expected.rates)
    if kind != "lora":
        loaded = AutoModelForCausalLM.from_pretrained(folder / f"{stage}-{kind}" / "saved")
        assert gap_of_weights(loaded, stock_model) <= WEIGHT_TOLERANCE


@pytest.mark.parametrize("stage", STAGES)
def test_overflow_skips_the_steps_of_body_and_head_together(folder, stage):
    stock, found = (json.loads((folder / f"{stage}-{kind}.json").read_text()) for kind in ("fp16-stock", "fp16"))
    print(f"{stage}: {found['skipped']} of the steps were skipped, stock {stock['skipped']}")
    assert 0 < found["skipped"] < 12
    assert found["skipped"] == stock["skipped"]
    # float16: the head's products are of higher precision than the layer's.
    assert found["curve"]["losses"] == pytest.approx(stock["curve"]["losses"], abs=1e-2)
    assert found["curve"]["evaluation"] == pytest.approx(stock["curve"]["evaluation"], abs=1e-2)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["tied", "torch"])
def test_weight_that_the_trainers_optimizer_owns_is_refused(folder, stage, kind):
    refused = json.loads((folder / f"{stage}-{kind}.json").read_text())["refused"]
    assert "deepspeed: it partitions the weight that the Trainer's optimizer owns" in refused


def test_model_that_would_be_saved_in_parts_is_refused(folder):
    refused = json.loads((folder / "zero3-ungathered.json").read_text())["refused"]
    assert "stage3_gather_16bit_weights_on_model_save" in refused


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage"),
        ({"tensor_parallel": {"autotp_size": 2}}, "autotp_size"),
        ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, "zenflow"),
        ({"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}, "optimizer.type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_option_is_refused_by_name_before_training(client, monkeypatch, change, named):
    trainer = make_trainer("unused")
    monkeypatch.setattr(trainer, "is_deepspeed_enabled", True)
    options = {"zero_optimization": {"stage": 2}, **change}
    plugin = type("Plugin", (), {"zero_stage": options["zero_optimization"]["stage"], "deepspeed_config": options})
    monkeypatch.setattr(type(trainer.accelerator.state), "deepspeed_plugin", plugin)
    with pytest.raises(headwater.InvalidArgumentError, match=named):
        setup_trainer(trainer, HeadwaterConfig(client=client, head=f"refused-{named.replace('_', '-').lower()}"))
