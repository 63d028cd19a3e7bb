"""`swift sft` and `swift pt` with and without `--callbacks headwater`."""

import sys

import pytest
from recipes import QUESTIONS, TEXTS, assert_same_run, model_folder, run, write_lines

ENVIRONMENTS = ("swift",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("swift")
    model_folder(folder / "model")
    write_lines(folder / "texts.jsonl", [{"messages": [{"role": "assistant", "content": text}]} for text in TEXTS])
    write_lines(folder / "chats.jsonl", QUESTIONS)
    (folder / "plugin.py").write_text("import headwater.swift\n")
    return folder


OURS = ["--external_plugins", "plugin.py", "--callbacks", "headwater"]


def command(folder, name, stage, *options):
    arguments = {
        "model": folder / "model",
        "model_type": "llama",
        "template": "chatml",
        "dataset": folder / ("texts.jsonl" if stage == "pt" else "chats.jsonl"),
        "tuner_type": "full",
        "torch_dtype": "float32",
        "output_dir": folder / name,
        "add_version": "false",
        "max_length": 64,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 8,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_steps": 8,
        "report_to": "none",
        "use_cpu": "true",
        "attn_impl": "eager",
        "split_dataset_ratio": 0,
        "dataset_num_proc": 1,
        "load_from_cache_file": "false",
        "check_model": "false",  # asks a hub
    }
    given = [str(word) for option, value in arguments.items() for word in (f"--{option}", value)]
    return [sys.executable, "-m", f"swift.cli.{stage}", *given, *options], folder / name / "checkpoint-8"


@pytest.mark.parametrize("stage", ["pt", "sft"])
def test_a_command_trains_as_without(folder, server, stage):
    line, stock = command(folder, f"stock-{stage}", stage)
    run(line, folder)
    line, ours = command(folder, f"ours-{stage}", stage, *OURS)
    run(line, folder, server.address)
    assert_same_run(stock, ours)


@pytest.mark.parametrize(("option", "value"), [("enable_dft_loss", "true"), ("loss_scale", "react")])
def test_another_loss_is_refused_by_name(folder, server, option, value):
    line, _ = command(folder, "refused", "sft", *OURS, f"--{option}", value)
    assert f"{option}:" in run(line, folder, server.address, fails=True)


def test_the_module_is_no_plugin_itself(folder, server):
    import headwater

    line, _ = command(
        folder, "refused", "sft", "--external_plugins", f"{headwater.__path__[0]}/swift.py", "--callbacks", "headwater"
    )
    assert "import headwater.swift" in run(line, folder, server.address, fails=True)
