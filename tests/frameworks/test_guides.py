"""The programs of the frameworks' guides print what the page shows, and their fragments run.

All run in this process, which has imported the frameworks, except a program that forks.
"""

import contextlib
import importlib.util
import io
import subprocess
import sys
from pathlib import Path

import pytest

# By path: the folder has a conftest of its own.
_spec = importlib.util.spec_from_file_location("docs_blocks", Path(__file__).parents[1] / "e2e/python/programs/docs_blocks.py")
docs_blocks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(docs_blocks)

BLOCKS = [block for page in docs_blocks.pages("newest") for block in docs_blocks.blocks_of(page)]

# The definitions that the fragments of a page rely on.
CONTEXTS = {
    "trl.md": """
import threading
import datasets, headwater, headwater.torch.teachers, headwater.trl, torch, transformers
from headwater.trl import HeadwaterConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import DistillationConfig
words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(61))]
rules = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
rules.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=rules, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
def new():
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, eos_token_id=1, pad_token_id=0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))
model, student = new(), new()
new().save_pretrained("teacher")
input_ids = labels = torch.arange(12).reshape(2, 6)
advantages = torch.ones(2, 5)
head = headwater.torch.attach(headwater.connect("localhost:50051"), "own", model.lm_head, model=model)
prompts = datasets.Dataset.from_list([{"prompt": f"w{number}"} for number in range(8)])
settings = dict(per_device_train_batch_size=2, use_cpu=True, bf16=False, report_to="none", save_strategy="no")
# The page's teacher is another process; here it is a thread, and its socket lies in this folder.
_serve, _joined, _ready = headwater.torch.teachers.serve_teacher, headwater.trl.JoinedTeacher, threading.Event()
def serve_teacher(teacher, client, address, tokenizer_size):
    def serve():
        _serve(teacher, headwater.connect("localhost:50051"), "unix:teacher.sock", tokenizer_size=64, ready=_ready.set)
    threading.Thread(target=serve, daemon=True).start()
monkeypatch.setattr(headwater.torch.teachers, "serve_teacher", serve_teacher)
monkeypatch.setattr(headwater.trl, "JoinedTeacher", lambda address: _ready.wait(60) and _joined("unix:teacher.sock"))
""",
    "transformers.md": """
import headwater, headwater.torch, headwater.transformers, torch, transformers
from headwater.transformers import HeadwaterConfig
def new():
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))
input_ids = labels = torch.arange(12).reshape(2, 6)
model = new()
headwater.transformers.attach_remote_head(model, HeadwaterConfig(server="localhost:50051", head="other"))
""",
    "lightning.md": """
import torch, transformers
from lightning.pytorch import LightningModule, Trainer
from headwater.lightning import HeadwaterCallback, HeadwaterConfig
class Module(LightningModule):
    def __init__(self):
        super().__init__()
        sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4)
        self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))
    def training_step(self, batch, index):
        return self.model(**batch).loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
module = Module()
ids = torch.arange(12).reshape(2, 6)
loader = torch.utils.data.DataLoader([{"input_ids": ids, "labels": ids}] * 2, batch_size=None)
quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
""",
}
# Before the fragments that begin so.
BETWEEN = {"remote = headwater.transformers.attach_remote_head": "model = new()\n"}


@pytest.fixture
def run(server, tmp_path, monkeypatch):
    """A function that runs a program in a folder of its own, and returns what it prints."""

    def run(program: str) -> str:
        program = program.replace(docs_blocks.PRINTED_ADDRESS, repr(server.address))
        if "fork" in program:
            done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout
        monkeypatch.chdir(tmp_path)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(program, {"__name__": "__main__", "monkeypatch": monkeypatch})
        return printed.getvalue()

    return run


@pytest.mark.parametrize("block", [block for block in BLOCKS if block[3]], ids=lambda block: block[0].name)
def test_guides_print_what_they_show(block, run):
    docs_blocks.check_output(run(block[2]), block[3])


@pytest.mark.parametrize("page", sorted({block[0] for block in BLOCKS if not block[3]}), ids=lambda page: page.name)
def test_fragments_of_guides_run(page, run):
    fragments = [text for of, _, text, output in BLOCKS if of == page and not output]
    between = [next((code for beginning, code in BETWEEN.items() if text.startswith(beginning)), "") for text in fragments]
    parts = [part for pair in zip(between, fragments, strict=True) for part in pair]
    run(CONTEXTS[page.name] + "".join(parts))
