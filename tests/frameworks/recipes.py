"""The inputs of other frameworks' command lines: a folder with a tiny model and its tokenizer, texts, and their run."""

import json
import os
import subprocess
from pathlib import Path

import tokenizers
import torch
import transformers

TEXTS = [f"The {animal} {verb} over the {thing}, and the {thing} {verb} back." for animal in ("fox", "dog", "owl", "newt")
         for verb in ("jumps", "looks", "sings") for thing in ("moon", "fence", "lake", "hill")]  # fmt: skip
QUESTIONS = [
    {"messages": [{"role": "user", "content": f"Who? {text[4:9]}"}, {"role": "assistant", "content": text}]} for text in TEXTS
]
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def model_folder(folder: Path, **sizes) -> Path:
    """A Llama, untied, with a tokenizer of bytes and a template of chats."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS,
        tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="<|im_end|>", pad_token="<pad>"
    )
    tokenizer.chat_template = _CHAT
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
            "initializer_range": 0.1,
            "bos_token_id": 1,
            "eos_token_id": 4,
            "pad_token_id": 0,
            **sizes,
        }
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_lines(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(command: list[str], folder: Path, server: str | None = None, fails: bool = False) -> str:
    """Runs a program of the environment in a folder; returns what it has written."""
    environment = {name: value for name, value in os.environ.items() if name not in ("HEADWATER_SERVER", "HEADWATER_TOKEN_FILE")}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    environment |= {"DO_NOT_TRACK": "1", "AXOLOTL_DO_NOT_TRACK": "1"}  # tests send no telemetry
    if server is not None:
        environment["HEADWATER_SERVER"] = server
    done = subprocess.run(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=False
    )
    assert (done.returncode != 0) == fails, done.stdout[-6000:]
    return done.stdout


def losses(folder: Path) -> list[float]:
    """The losses that a Trainer has logged, of the newest run in a folder."""
    states = sorted(folder.rglob("trainer_state.json"), key=lambda path: path.stat().st_mtime)
    assert states, f"no trainer_state.json under {folder}"
    return [entry["loss"] for entry in json.loads(states[-1].read_text())["log_history"] if "loss" in entry]


def head_weight(folder: Path) -> torch.Tensor:
    """The head's weight in the model that a run has saved."""
    import safetensors.torch

    return safetensors.torch.load_file(folder / "model.safetensors")["lm_head.weight"]


def assert_same_run(stock: Path, ours: Path) -> None:
    """Equal losses, which have gone down, and equal weights of the last layer, which have moved."""
    expected, found = losses(stock), losses(ours)
    assert len(expected) >= 6
    assert len(expected) == len(found)
    assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=0, atol=1e-4), (found, expected)
    assert expected[0] - expected[-1] > 0.1
    assert torch.allclose(head_weight(ours), head_weight(stock), rtol=0, atol=1e-4)
