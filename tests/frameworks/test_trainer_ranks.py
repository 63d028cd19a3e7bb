"""Two ranks (gloo, CPU) have the curve and the weights of one rank with batches of twice the size, or are refused by name."""

import json

import pytest
from rank_runs import run_two_ranks
from rank_trainer import model_of
from tiny_trainer import Curve, gap_of_weights, train
from transformers import AutoModelForCausalLM

from headwater.transformers import HeadwaterConfig

KINDS = ("served", "tied", "torch", "lora")
SAVES = {"save_strategy": "steps", "save_steps": 6}
LOSS_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def stock():
    """Curve and model of stock transformers on one rank, by kind."""
    return {kind: train(model_of(kind)) for kind in KINDS}


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def two_ranks(server, tmp_path_factory, request):
    """How the ranks share the model, and the folder with what rank 0 wrote, by kind."""
    folder = tmp_path_factory.mktemp("ranks")
    kinds = KINDS
    if request.param == "ddp":
        # The ranks continue what one rank has begun.
        kinds += ("resumed",)
        config = HeadwaterConfig(server=server.address, head="ddp-resumed")
        train(model_of("resumed"), config, folder=folder / "ddp-resumed", **SAVES)
    run_two_ranks("rank_trainer.py", folder, server.address, folder, request.param, *kinds)
    return request.param, folder


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_have_the_curve_of_one(two_ranks, stock, kind):
    sharding, folder = two_ranks
    found = json.loads((folder / f"{sharding}-{kind}.json").read_text())
    if sharding == "fsdp2" and kind in ("tied", "torch"):
        assert "fsdp: it shards the weight that the Trainer's optimizer owns" in found["refused"]
        return

    curve = Curve(**found)
    expected, stock_model = stock[kind]
    print(f"{sharding}, {kind}: losses differ by at most {curve.gap(expected):.2e}")
    assert curve.gap(expected) <= LOSS_TOLERANCE
    assert curve.norms == pytest.approx(expected.norms, abs=1e-4)
    if kind != "lora":
        loaded = AutoModelForCausalLM.from_pretrained(folder / f"{sharding}-{kind}" / "saved")
        assert gap_of_weights(loaded, stock_model) <= WEIGHT_TOLERANCE


@pytest.mark.parametrize("two_ranks", ["ddp"], indirect=True)
@pytest.mark.parametrize("direction", ["one to two", "two to one"])
def test_run_resumes_with_another_number_of_ranks(two_ranks, server, stock, direction):
    _, folder = two_ranks
    expected, stock_model = stock["served"]
    if direction == "one to two":
        curve = Curve(**json.loads((folder / "ddp-resumed.json").read_text()))
        model = AutoModelForCausalLM.from_pretrained(folder / "ddp-resumed" / "saved")
    else:
        config = HeadwaterConfig(server=server.address, head="ddp-served")
        curve, model = train(model_of("served"), config, folder / "ddp-served" / "checkpoint-6", folder / "again")
    print(f"{direction}: losses differ by at most {curve.gap(expected):.2e}")
    assert curve.gap(expected) <= LOSS_TOLERANCE
    assert gap_of_weights(model, stock_model) <= WEIGHT_TOLERANCE
