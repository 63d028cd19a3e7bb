"""Two ranks have the curve and the weights of one rank with batches of twice the size, or are refused by name.

Over gloo on a CPU; under tests/gpu, which wants two GPUs for it, over NCCL.
"""

import json

import pytest
from figure_rows import write_figures
from rank_trainer import model_of
from tiny_trainer import ON_GPU, Curve, gap_of_weights, train
from transformers import AutoModelForCausalLM
from two_ranks import run_ranks

ENVIRONMENTS = ("newest", "gpu")
pytestmark = pytest.mark.gpu_group
KINDS = ("served", "tied", "torch", "lora", "bf16")
LOSS_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def stock():
    """Curve and model of stock transformers on one rank, by kind."""
    return {kind: train(model_of(kind), bf16=kind == "bf16") for kind in KINDS}


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
    gap = curve.gap(expected)
    # In bf16 a few times what stock itself moves by when it is computed in it.
    tolerance = 3 * expected.gap(stock["served"][0]) if kind == "bf16" else LOSS_TOLERANCE
    print(f"{sharding}, {kind}: losses differ by at most {gap:.2e}, allowed {tolerance:.2e}")
    write_figures((f"{'nccl' if ON_GPU else 'gloo'}_two_ranks_{sharding}_{kind}_to_one_rank", gap, "loss", tolerance))
    assert gap <= tolerance
    assert curve.norms == pytest.approx(expected.norms, abs=0.1 if kind == "bf16" else 1e-4)
    if kind not in ("lora", "bf16"):
        loaded = AutoModelForCausalLM.from_pretrained(folder / f"{sharding}-{kind}" / "saved")
        assert gap_of_weights(loaded, stock_model) <= WEIGHT_TOLERANCE
