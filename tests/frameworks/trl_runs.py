"""The common parts of the tests of TRL's trainers: a tokenizer, tiny models, and the settings that make two runs equal."""

import functools
import itertools

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

TOKENS = 97
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
WORDS = [f"w{index}" for index in range(len(SPECIAL), TOKENS)]
STEPS = 10
NUMBERS = itertools.count()  # heads of one server have names of their own
# Settings of every run: two micro-batches a step, a schedule, clipping that is active.
SETTINGS = {
    "gradient_accumulation_steps": 2,
    "max_steps": STEPS,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "cosine",
    "max_grad_norm": 0.05,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}
_TIMES = ("runtime", "_per_second", "total_flos", "step_time", "epoch")


@functools.cache
def tokenizer():
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(SPECIAL + WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def language_model(seed=0, hidden_size=32, vocab_size=TOKENS, **settings):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **settings,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    torch.nn.init.normal_(model.lm_head.weight, std=0.4)
    return model


def sentence(generator):
    """Two to six words."""
    count = int(torch.randint(2, 7, (1,), generator=generator))
    return " ".join(WORDS[int(index)] for index in torch.randint(len(WORDS), (count,), generator=generator))


def _logs(trainer):
    return [{name: entry[name] for name in entry if not name.endswith(_TIMES)} for entry in trainer.state.log_history]


def check_equal(ours, stock, but=()):
    """Everything that two trainers have logged at every step, and their weights, are equal to 1e-4.

    Args:
        but: names of what is not compared.
    """
    mine, theirs = _logs(ours), _logs(stock)
    assert len(mine) == len(theirs) > STEPS
    gaps = [abs(got["loss"] - expected["loss"]) for got, expected in zip(mine, theirs, strict=True) if "loss" in expected]
    print(f"losses differ by at most {max(gaps):.2e}")
    for step, (got, expected) in enumerate(zip(mine, theirs, strict=True)):
        assert got.keys() == expected.keys()
        for name in expected.keys() - set(but):
            value = expected[name]
            assert got[name] == pytest.approx(value, rel=1e-4, abs=1e-4), (step, name)
    weights = dict(stock.model.named_parameters())
    for name, weight in ours.model.named_parameters():
        assert torch.allclose(weight, weights[name], rtol=1e-4, atol=1e-4), (name, (weight - weights[name]).abs().max())


def was_clipped(trainer):
    """Whether a step's gradients were scaled down."""
    return any(entry.get("grad_norm", 0) > SETTINGS["max_grad_norm"] for entry in trainer.state.log_history)
