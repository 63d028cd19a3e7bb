"""Axolotl's `train` with and without the plugin in the YAML file."""

import sys

import pytest
import yaml
from recipes import QUESTIONS, TEXTS, assert_same_run, model_folder, run, write_lines

ENVIRONMENTS = ("axolotl",)

PLUGIN = {"plugins": ["headwater.axolotl.HeadwaterPlugin"]}
TRAIN = [sys.executable, "-m", "axolotl.cli.train"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("axolotl")
    model_folder(folder / "model")
    write_lines(folder / "texts.jsonl", [{"text": text} for text in TEXTS])
    write_lines(folder / "chats.jsonl", QUESTIONS)
    return folder


def recipe(folder, name, stage, **options):
    """Writes a YAML file, and returns its path and that of its output."""
    dataset = {"path": str(folder / "texts.jsonl"), "type": "completion"}
    if stage == "sft":
        dataset = {"path": str(folder / "chats.jsonl"), "type": "chat_template"}
    entries = {
        "base_model": str(folder / "model"),
        "datasets": [{**dataset, "ds_type": "json"}],
        "dataset_prepared_path": str(folder / f"prepared-{stage}"),
        "output_dir": str(folder / name),
        "sequence_len": 64,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 8,
        "learning_rate": 1.0e-2,
        "weight_decay": 0.1,
        "lr_scheduler": "cosine",
        "optimizer": "adamw_torch",
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_steps": 8,
        "val_set_size": 0,
        "bf16": False,
        "fp16": False,
        "tf32": False,
        "use_cpu": True,
        "special_tokens": {"pad_token": "<pad>"},
        **options,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(entries))
    return path, folder / name


@pytest.mark.parametrize("stage", ["pt", "sft"])
def test_a_recipe_trains_as_without(folder, server, stage):
    path, stock = recipe(folder, f"stock-{stage}", stage)
    run([*TRAIN, path], folder)
    # The server is named by the environment, or by the YAML file.
    named = {} if stage == "pt" else {"headwater": {"server": server.address, "head": "axolotl-named"}}
    path, ours = recipe(folder, f"ours-{stage}", stage, **PLUGIN, **named)
    run([*TRAIN, path], folder, None if named else server.address)
    assert_same_run(stock, ours)


@pytest.mark.parametrize(
    "options",
    [{"chunked_cross_entropy": True}, {"headwater": {"surver": "here"}}],
    ids=["fused", "typing error"],
)
def test_what_a_head_cannot_do_is_refused_by_name(folder, server, options):
    path, _ = recipe(folder, "refused", "sft", **PLUGIN, **options)
    said = run([*TRAIN, path], folder, server.address, fails=True)
    assert f"{next(iter(options))}:" in said
