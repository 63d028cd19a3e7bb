"""`python -m headwater.llamafactory train` beside `llamafactory-cli train`, of the same recipe."""

import json
import sys

import pytest
import yaml
from recipes import QUESTIONS, TEXTS, assert_same_run, model_folder, run, write_lines

ENVIRONMENTS = ("llamafactory",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llamafactory")
    model_folder(folder / "model")
    write_lines(folder / "texts.jsonl", [{"text": text} for text in TEXTS])
    write_lines(folder / "chats.jsonl", QUESTIONS)
    columns = {"formatting": "sharegpt", "columns": {"messages": "messages"}}
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    described = {
        "texts": {"file_name": "texts.jsonl", "columns": {"prompt": "text"}},
        "chats": {"file_name": "chats.jsonl", **columns, "tags": tags},
    }
    (folder / "dataset_info.json").write_text(json.dumps(described))
    return folder


def recipe(folder, name, stage, **options):
    """Writes a recipe, and returns the path of it and of its output."""
    entries = {
        "model_name_or_path": str(folder / "model"),
        "stage": stage,
        "do_train": True,
        "finetuning_type": "full",
        "dataset": "texts" if stage == "pt" else "chats",
        "dataset_dir": str(folder),
        "template": "chatml",
        "cutoff_len": 64,
        "output_dir": str(folder / name),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 8,
        "learning_rate": 1.0e-2,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_steps": 8,
        "report_to": "none",
        "use_cpu": True,
        "overwrite_cache": True,
        **options,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(entries))
    return path, folder / name


OURS = [sys.executable, "-m", "headwater.llamafactory", "train"]
STOCK = [sys.executable, "-m", "llamafactory.cli", "train"]
TWO_PROCESSES = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *OURS[1:]]


@pytest.mark.parametrize("stage", ["pt", "sft"])
def test_a_recipe_trains_as_without(folder, server, stage):
    path, stock = recipe(folder, f"stock-{stage}", stage)
    run([*STOCK, path], folder)
    path, ours = recipe(folder, f"ours-{stage}", stage)
    run([*OURS, path], folder, server.address)
    assert_same_run(stock, ours)


def test_two_processes_of_torchrun_train_as_one_without(folder, server):
    path, stock = recipe(folder, "stock-two", "sft", average_tokens_across_devices=True)
    run([*STOCK, path], folder)
    path, ours = recipe(
        folder, "ours-two", "sft", average_tokens_across_devices=True, per_device_train_batch_size=1, ddp_backend="gloo"
    )
    run([*TWO_PROCESSES, path], folder, server.address)
    assert_same_run(stock, ours)


@pytest.mark.parametrize(
    ("stage", "options"),
    [("dpo", {"pref_beta": 0.1}), ("sft", {"use_dft_loss": True}), ("sft", {"compute_accuracy": True})],
    ids=["dpo", "dft", "accuracy"],
)
def test_another_loss_is_refused_by_name(folder, server, stage, options):
    path, _ = recipe(folder, "refused", stage, **options)
    said = run([*OURS, path], folder, server.address, fails=True)
    assert f"{'stage' if stage == 'dpo' else next(iter(options))}:" in said.splitlines()[-1]
