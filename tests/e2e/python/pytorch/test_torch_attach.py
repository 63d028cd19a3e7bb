"""How `headwater.torch.attach` reads a model that does not run by itself, and which layers it refuses before anything is sent."""

import types
import warnings

import pytest
import torch
from expectations import refused

import headwater
import headwater.torch

VOCAB_SIZE, HIDDEN_SIZE = 16, 8


def namespace(entries):
    """A configuration as an object, nested ones included."""
    return types.SimpleNamespace(**{key: namespace(value) if isinstance(value, dict) else value for key, value in entries.items()})


def model_of(**config):
    """A model without a forward, so that its configuration alone can be looked at."""
    model = torch.nn.Module()
    model.lm_head = torch.nn.Linear(HIDDEN_SIZE, VOCAB_SIZE, bias=False)
    model.config = namespace(config)
    return model


def attach(client, model, **options):
    """Attaches, looks and deletes again; the warning that the configuration alone was looked at is expected."""
    with pytest.warns(UserWarning, match="Only its config was looked at"):
        head = headwater.torch.attach(client, "configured", model.lm_head, model=model, trainable=False, **options)
    head.delete()
    assert head.checked == "config"
    return head


KEYS = [
    ({"final_logit_softcapping": 30.0}, {"softcap": 30.0}),
    ({"logits_soft_cap": 30}, {"softcap": 30}),
    ({"output_logit_soft_cap": 30.0}, {"softcap": 30.0}),
    ({"logit_scale": 0.0625}, {"logit_scale": 0.0625}),
    ({"logits_scaling": 8.0}, {"logit_scale": 1 / 8.0}),
    ({"lm_head_multiplier": 0.5}, {"logit_scale": 0.5}),
    ({"output_multiplier_scale": 0.25}, {"logit_scale": 0.25}),
    ({"output_multiplier": 0.196}, {"logit_scale": 0.196}),
    ({"logits_mup_width_multiplier": 24.0}, {"logit_scale": 1 / 24.0}),
    ({"mup_width_multiplier": 8.0}, {"logit_scale": 1 / 8.0}),
    ({"mup_output_alpha": 2.2}, {"logit_scale": 2.2}),
    ({"mup_output_alpha": 2.2, "mup_width_scale": 0.5}, {"logit_scale": 1.1}),
    ({"logit_scale": "inv_sqrt_d_model", "d_model": 64}, {"logit_scale": 1 / 8}),
    ({"model_type": "t5", "tie_word_embeddings": True, "d_model": 64}, {"logit_scale": 1 / 8}),
    ({"model_type": "umt5", "tie_word_embeddings": True, "d_model": 64}, {"logit_scale": 1 / 8}),
    ({"model_type": "pop2piano", "tie_word_embeddings": True, "d_model": 64}, {"logit_scale": 1 / 8}),
    ({"model_type": "minicpm", "dim_model_base": 256, "hidden_size": 2304}, {"logit_scale": 256 / 2304}),
    ({"model_type": "granite", "logits_scaling": 8.0}, {"logit_scale": 1 / 8.0}),
    ({"model_type": "hyperclovax", "logits_scaling": 8.0}, {"logit_scale": 8.0}),
    ({"unpadded_vocab_size": 13}, {"valid_vocab_size": 13}),
]


@pytest.mark.parametrize(("config", "option"), KEYS, ids=[max(config) for config, _ in KEYS])
@pytest.mark.parametrize("place", ("", "text_config", "decoder", "llm_config", "language_config", "thinker_config.text_config"))
def test_every_key_is_seen_wherever_a_configuration_has_it(client, config, option, place):
    nested = config
    for name in reversed(place.split(".") if place else []):
        nested = {name: nested}
    model = model_of(**nested)
    with refused("INVALID_COMBINATION", ValueError) as info:
        attach_quietly(client, model)
    (name, value), written = next(iter(option.items())), str(info.value).split("pass ")[1].split(",")[0].split(" for ")[0]
    assert written.startswith(f"{name}=") and eval(written.partition("=")[2]) == pytest.approx(value, rel=1e-12)
    assert info.value.metadata["field"] == name
    if len(config) == 1:
        (key, said), *_ = config.items()
        assert f"{key}={said!r}" in str(info.value) and info.value.metadata["actual"] == str(said)
    with refused("INVALID_COMBINATION", ValueError):  # another option than the one that is asked for
        attach_quietly(client, model, **({"logit_scale": 1.0} if name == "softcap" else {"softcap": None}))
    assert not [info for info in client.heads() if "refused" in info.name]
    head = attach(client, model, **option)
    assert getattr(head.spec, name) == pytest.approx(value)


def attach_quietly(client, model, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        headwater.torch.attach(client, "refused", model.lm_head, model=model, trainable=False, **options)


def test_a_configuration_that_leaves_logits_alone_asks_for_nothing(client):
    neutral = {
        "final_logit_softcapping": None,
        "logits_soft_cap": 0.0,
        "logit_scale": 1,
        "logits_scaling": 1.0,
        "lm_head_multiplier": 1.0,
        "output_multiplier_scale": 1.0,
        "text_config": {"logit_scale": None, "final_logit_softcapping": False, "scale_logits": False},
    }
    model = model_of()
    for config in (neutral, {"text_config": None}, {}):
        model.config = types.SimpleNamespace(**config)
        assert attach(client, model).spec.softcap is None
    model.config = {"final_logit_softcapping": 30.0}  # a mapping; the trainer says that it does otherwise
    assert attach(client, model, softcap=None).spec.softcap is None


@pytest.mark.parametrize("key", ("final_logit_boost", "lm_head_gain", "output_mult_of_mine", "my_soft_cap"))
def test_a_key_that_may_change_logits_is_named(client, key):
    model = model_of(**{key: 3.0})
    with refused("INVALID_COMBINATION", ValueError, f"{key}=3.0", "not known here"):
        attach_quietly(client, model)
    attach(client, model, logit_scale=1.0)
    attach(client, model_of(attn_logit_softcapping=50.0, num_logits_to_keep=1, output_router_logits=True, router_z_logit=0.1))


def test_a_bias_that_is_added_to_logits_is_named(client):
    model = model_of()
    model.register_buffer("final_logits_bias", torch.zeros(1, VOCAB_SIZE))
    attach(client, model)
    model.final_logits_bias[0, 3] = 1
    with refused("INVALID_COMBINATION", ValueError, "final_logits_bias"):
        attach_quietly(client, model)


def test_a_configuration_with_fewer_columns_than_the_layer_is_noted(client):
    assert "pass valid_vocab_size=13" in attach(client, model_of(vocab_size=13)).checked_reason
    assert "valid_vocab_size" not in attach(client, model_of(vocab_size=13), valid_vocab_size=13).checked_reason


def test_what_was_compared_is_said_without_being_a_nuisance(client):
    class Ids(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lm_head = torch.nn.Linear(HIDDEN_SIZE, VOCAB_SIZE)

        def forward(self, input_ids):
            raise RuntimeError("needs pixels")

    class Rows(Ids):
        def forward(self, rows):
            return self.lm_head(rows)

    model = Ids()
    with pytest.warns(UserWarning, match="needs pixels"):
        head = headwater.torch.attach(client, "seen", model.lm_head, model=model)
    assert head.checked == "nothing"
    head.delete()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model in (None, Rows()):  # no language model of the usual form
            layer = torch.nn.Linear(HIDDEN_SIZE, VOCAB_SIZE) if model is None else model.lm_head
            head = headwater.torch.attach(client, "seen", layer, model=model)
            assert head.checked == "nothing" and head.checked_reason
            head.delete()


# ---- layers ----------------------------------------------------------------------------------------------------------------


def layer_with(**members):
    """A linear layer; tensors among `members` replace or join its own."""
    layer = torch.nn.Linear(HIDDEN_SIZE, VOCAB_SIZE)
    for name, value in members.items():
        setattr(layer, name, torch.nn.Parameter(value, requires_grad=False))
    return layer


LAYERS = {
    "lazy": (lambda: torch.nn.LazyLinear(VOCAB_SIZE), "no values yet"),
    "sparse": (lambda: layer_with(weight=torch.ones(VOCAB_SIZE, HIDDEN_SIZE).to_sparse()), "sparse"),
    "quantised": (lambda: layer_with(weight=torch.zeros(VOCAB_SIZE, HIDDEN_SIZE, dtype=torch.int8)), "quantised"),
    "quantised, packed": (lambda: layer_with(qweight=torch.zeros(4, dtype=torch.int32)), "quantised"),
    "no linear layer": (lambda: torch.nn.Conv1d(1, 1, 1), "torch.nn.Linear"),
    "meta": (lambda: torch.nn.Linear(HIDDEN_SIZE, VOCAB_SIZE, device="meta"), "meta"),
}


@pytest.mark.parametrize("case", LAYERS)
def test_a_layer_that_no_head_can_be_is_named(client, case):
    build, message = LAYERS[case]
    with refused("INVALID_COMBINATION", ValueError, message):
        headwater.torch.attach(client, "refused", build())
    assert not [info for info in client.heads() if "refused" in info.name]


# ---- habits from PyTorch ---------------------------------------------------------------------------------------------------


def test_transforms_of_torch_func_are_refused(client):
    func = getattr(torch, "func", None) or pytest.importorskip("functorch")
    head = client.create_head("transformed", torch.randn(VOCAB_SIZE, HIDDEN_SIZE), trainable=False)
    loss_fn = headwater.torch.CrossEntropyLoss(head)
    hidden, targets = torch.randn(3, HIDDEN_SIZE), torch.tensor([1, 2, 3])
    transforms = {
        "grad": lambda: func.grad(lambda rows: loss_fn(rows, targets))(hidden),
        "vmap": lambda: func.vmap(lambda rows: loss_fn(rows, targets))(hidden.expand(2, 3, HIDDEN_SIZE)),
        "vmap of targets": lambda: func.vmap(lambda ids: loss_fn(hidden, ids))(targets.expand(2, 3)),
        "vmap of token weights": lambda: func.vmap(lambda w: loss_fn(hidden, targets, token_weights=w))(torch.ones(2, 3)),
        "jvp": lambda: func.jvp(lambda rows: loss_fn(rows, targets), (hidden,), (hidden,)),
        "jsd": lambda: func.grad(lambda rows: headwater.torch.jsd(head, rows, head, hidden))(hidden),
        "jsd of the teacher's": lambda: func.vmap(lambda rows: headwater.torch.jsd(head, hidden, head, rows))(hidden[None]),
    }
    for transform in transforms.values():
        with refused("INVALID_COMBINATION", ValueError, "torch.func"):
            transform()
    assert float(loss_fn(hidden, targets)) > 0  # and none of them has left anything behind
    head.delete()
