"""Two ranks have the curve and the weights of one rank with batches of twice the size, or are refused by name.

Over gloo on a CPU; under tests/gpu, which wants two GPUs for it, over NCCL.
"""

import json

import pytest
from figure_rows import write_figures
from rank_runs import run_two_ranks
from rank_trainer import model_of
from tiny_trainer import ON_GPU, Curve, gap_of_weights, train
from transformers import AutoModelForCausalLM

from headwater.transformers import HeadwaterConfig

ENVIRONMENTS = ("newest", "gpu")
pytestmark = pytest.mark.gpu_group
KINDS = ("served", "tied", "torch", "lora", "bf16")
SAVES = {"save_strategy": "steps", "save_steps": 6}
LOSS_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def stock():
    """Curve and model of stock transformers on one rank, by kind."""
    return {kind: train(model_of(kind)) for kind in KINDS if kind != "bf16"}


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def two_ranks(server, tmp_path_factory, request):
    """How the ranks share the model, and the folder with what rank 0 wrote, by kind."""
    folder = tmp_path_factory.mktemp("ranks")
    kinds = (*KINDS, "bf16-stock")
    if request.param == "ddp":
        # The ranks continue what one rank has begun.
        kinds += ("continued",)
        config = HeadwaterConfig(server=server.address, head="ddp-continued")
        train(model_of("continued"), config, folder=folder / "ddp-continued", **SAVES)
    run_two_ranks("rank_trainer.py", folder, server.address, folder, request.param, *kinds)
    return request.param, folder


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_have_the_curve_of_one(two_ranks, stock, kind):
    sharding, folder = two_ranks
    found = json.loads((folder / f"{sharding}-{kind}.json").read_text())
    if sharding == "fsdp2" and kind in ("tied", "torch"):
        assert "fsdp: it shards the weight that the Trainer's optimizer owns" in found["refused"]
        return

    curve = Curve(**found["curve"])
    if kind == "bf16":
        # As two ranks of stock have it, by no more than twice what computing in bf16 moves those. FSDP2 rounds the loss itself,
        # to steps of 2^-5.
        expected = Curve(**json.loads((folder / f"{sharding}-bf16-stock.json").read_text())["curve"])
        tolerance = 2**-5 if sharding == "fsdp2" else 2 * expected.gap(stock["served"][0])
    else:
        expected, stock_model = stock[kind]
        tolerance = LOSS_TOLERANCE
    gap = curve.gap(expected)
    print(f"{sharding}, {kind}: losses differ by at most {gap:.2e}, allowed {tolerance:.2e}")
    write_figures((f"{'nccl' if ON_GPU else 'gloo'}_two_ranks_{sharding}_{kind}_to_stock", gap, "loss", tolerance))
    assert gap <= tolerance
    assert curve.norms == pytest.approx(expected.norms, abs=0.1 if kind == "bf16" else 1e-4)
    if kind not in ("lora", "bf16"):
        loaded = AutoModelForCausalLM.from_pretrained(folder / f"{sharding}-{kind}" / "saved")
        assert gap_of_weights(loaded, stock_model) <= WEIGHT_TOLERANCE


@pytest.mark.parametrize("two_ranks", ["ddp"], indirect=True)
@pytest.mark.parametrize("direction", ["one to two", "two to one"])
def test_run_resumes_with_another_number_of_ranks(two_ranks, server, stock, direction):
    _, folder = two_ranks
    expected, stock_model = stock["served"]
    if direction == "one to two":
        curve = Curve(**json.loads((folder / "ddp-continued.json").read_text())["curve"])
        model = AutoModelForCausalLM.from_pretrained(folder / "ddp-continued" / "saved")
    else:
        config = HeadwaterConfig(server=server.address, head="ddp-served")
        curve, model = train(model_of("served"), config, folder / "ddp-served" / "checkpoint-6", folder / "again")
    print(f"{direction}: losses differ by at most {curve.gap(expected):.2e}")
    assert curve.gap(expected) <= LOSS_TOLERANCE
    assert gap_of_weights(model, stock_model) <= WEIGHT_TOLERANCE
