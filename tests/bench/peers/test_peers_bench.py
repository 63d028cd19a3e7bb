"""The peers' benchmark runs, tiny, on the CPU; its reference equals autograd's result; trained rows are as the recipe says."""

import pathlib
import sys

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import peers  # noqa: E402
import trained  # noqa: E402


def test_ways_are_timed_against_the_products_in_the_same_work(smoke_run):
    values = smoke_run("peers")
    for case in ("ce_n64_h32_v512", "jsd_n64_hs32_ht16_v512", "trained_n64_h256_v512", "trained_jsd_n64_hs256_ht256_v512"):
        for way in (
            "headwater_fp32",
            "headwater_first",
            "headwater_tau_2_8",
            "torch_compile_anew",
            "torch_eager_bf16",
            "torch_compile_addmm_fp32",
        ):
            assert values[f"cpu_peers_{case}_{way}_ms"] > 0
            assert values[f"cpu_peers_{case}_{way}_ratio"] > 0
        assert values[f"cpu_peers_{case}_headwater_over_best_fp32"] > 0
    assert values["cpu_peers_ce_2x32_h32_v512_headwater_fp32_ms"] > 0
    assert "cpu_peers_ce_2x32_h32_v512_torch_eager_anew_ms" not in values


@pytest.mark.parametrize("teacher", (False, True))
def test_the_reference_is_autograds(teacher):
    torch.manual_seed(3)
    hidden, weight = torch.randn(12, 8), torch.randn(20, 8)
    targets = torch.randint(20, (12,))
    teacher_hidden, teacher_weight = (torch.randn(12, 5), torch.randn(20, 5)) if teacher else (None, None)
    problem = peers.Problem(hidden, weight, targets, 1, (teacher_hidden, teacher_weight) if teacher else None)
    loss, grad_hidden, grad_weight = peers.reference(problem, 12, torch.arange(20), torch.float64)
    part = problem.parts[0]
    expected = peers.eager_loss(part.hidden, problem.weight, targets, teacher_hidden, teacher_weight)
    expected.backward()
    assert abs(loss - float(expected.detach())) <= 1e-5 * abs(loss)
    for ours, theirs in ((grad_hidden, part.hidden.grad), (grad_weight, problem.weight.grad)):
        assert float(torch.linalg.norm(ours - theirs)) <= 1e-5 * float(torch.linalg.norm(ours))


def test_shuffled_rows_have_the_same_tail_in_another_order():
    recipe = trained.Recipe(first=1.0)
    made = [trained.make_rows(64, 256, 4096, "cpu", shuffled=order, recipe=recipe) for order in (False, True)]
    later_halves = [float((targets >= 2048).float().mean()) for _, _, targets in made]
    assert later_halves[0] < 0.7 * later_halves[1]
    plain, shuffled = (trained.statistics_of(*rows) for rows in made)
    for tau in trained.TAUS:
        for quantity in ("entries", "entries_beside_0.25"):
            assert abs(shuffled[tau, quantity] / plain[tau, quantity] - 1) <= 0.1
        assert 0 < plain[tau, "entries_beside_0.25"] < plain[tau, "entries"] / 2 <= 0.5 / trained.TAUS[tau]
