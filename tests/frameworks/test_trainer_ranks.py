"""Two ranks (gloo, CPU) have the curve and the weights of one rank with batches of twice the size, or are refused by name."""

import json

import pytest
from rank_trainer import model_of
from tiny_trainer import Curve, gap_of_weights, train
from transformers import AutoModelForCausalLM
from two_ranks import run_ranks

KINDS = ("served", "tied", "torch", "lora")
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
    run_ranks(server.address, folder, request.param, KINDS)
    return request.param, folder


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_have_the_curve_of_one(two_ranks, stock, kind):
    sharding, folder = two_ranks
    found = json.loads((folder / f"{sharding}-{kind}.json").read_text())
    if sharding == "fsdp2" and kind in ("tied", "torch"):
        assert "fsdp: it shards the weight that the Trainer's optimizer owns" in found["refused"]
        return

    curve = Curve(**found["curve"])
    expected, stock_model = stock[kind]
    print(f"{sharding}, {kind}: losses differ by at most {curve.gap(expected):.2e}")
    assert curve.gap(expected) <= LOSS_TOLERANCE
    assert curve.norms == pytest.approx(expected.norms, abs=1e-4)
    if kind != "lora":
        loaded = AutoModelForCausalLM.from_pretrained(folder / f"{sharding}-{kind}" / "saved")
        assert gap_of_weights(loaded, stock_model) <= WEIGHT_TOLERANCE
