"""Ways in which a model is another one than its last layer says: each with its place, and the check of `attach` that finds it."""

import types
import warnings

import pytest
import torch
from expectations import refused

import headwater
import headwater.torch

VOCAB_SIZE, HIDDEN_SIZE = 96, 32
DTYPES = (torch.float32, torch.bfloat16)
IDS = torch.arange(24).view(2, 12) * 7 % 89
BATCH = {"input_ids": IDS, "labels": torch.where(torch.arange(24).view(2, 12) < 4, -100, IDS)}


class Model(torch.nn.Module):
    """A language model of the usual form, with a hook for what is planted behind its layer and one for before it."""

    def __init__(self, dtype, *, behind=None, before=None, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE), torch.nn.LayerNorm(HIDDEN_SIZE))
        self.lm_head = torch.nn.Linear(HIDDEN_SIZE, VOCAB_SIZE, bias=False)
        self.config = types.SimpleNamespace(vocab_size=VOCAB_SIZE, tie_word_embeddings=tied)
        self.behind, self.before = behind, before
        with torch.no_grad():
            self.lm_head.weight.normal_(0, 0.3)
        self.to(dtype)

    def forward(self, input_ids, labels=None):
        hidden = self.model(input_ids)
        logits = self.lm_head(hidden if self.before is None else self.before(hidden))
        logits = logits if self.behind is None else self.behind(logits)
        loss = None
        if labels is not None:
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
        return types.SimpleNamespace(loss=loss, logits=logits)


class Module(torch.nn.Module):
    """As Lightning's modules: around the model, without its configuration."""

    def __init__(self, model):
        super().__init__()
        self.net = model

    def forward(self, **batch):
        return self.net(**batch)


class Scaled(torch.nn.Linear):
    """A layer of its own kind, which has the final norm."""

    def forward(self, hidden):
        return super().forward(torch.nn.functional.layer_norm(3 * hidden, hidden.shape[-1:]))


def norm(hidden):
    return torch.nn.functional.layer_norm(hidden, hidden.shape[-1:], torch.linspace(0.5, 2, HIDDEN_SIZE, dtype=hidden.dtype))


def with_layer(model, layer):
    model.lm_head = layer
    return model


def padded(logits):
    logits = logits.clone()
    logits[..., 90:] = torch.finfo(logits.dtype).min
    return logits


# Name: the model with it, the check that must find it, what the message says.
PLANTED = {
    "scale": (lambda d: Model(d, behind=lambda x: x * 0.125), "value", "Pass logit_scale=0.125"),
    "cap": (lambda d: Model(d, behind=lambda x: 30 * torch.tanh(x / 30)), "value", "Pass softcap=30.0"),
    "bias": (
        lambda d: Model(d, behind=lambda x: x + torch.linspace(-1, 1, VOCAB_SIZE, dtype=x.dtype)),
        "value",
        "something else behind the layer",
    ),
    "wrapper": (lambda d: Module(torch.nn.DataParallel(Model(d, behind=lambda x: x * 8))), "value", "Pass logit_scale=8"),
    "reparametrisation": (
        lambda d: with_layer(model := Model(d), torch.nn.utils.weight_norm(model.lm_head)),
        "type",
        "parametrization",
    ),
    "tied copy": (lambda d: Model(d, tied=True), "identity", "tie_word_embeddings=True"),
    "padded columns": (lambda d: Model(d, behind=padded), "value", "Pass valid_vocab_size=90"),
    "cut columns": (lambda d: Model(d, behind=lambda x: x[..., :90]), "value", "Pass valid_vocab_size=90"),
    "final norm in the layer": (
        lambda d: with_layer(Model(d), Scaled(HIDDEN_SIZE, VOCAB_SIZE, dtype=d)),
        "type",
        "computes something else",
    ),
}


def layer_of(model):
    while not hasattr(model, "lm_head"):
        model = model.net if hasattr(model, "net") else model.module
    return model.lm_head


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_difference_is_refused(client, case, dtype):
    """With the option that makes the head the model's, if there is one."""
    build, check, message = PLANTED[case]
    model = build(dtype)
    before = client.heads()
    with refused("INVALID_COMBINATION", ValueError, message) as info:
        headwater.torch.attach(client, "planted", layer_of(model), model=model)
    said = str(info.value)
    assert ("log-probabilities differ by up to" in said) == (check == "value")
    assert client.heads() == before
    if "Pass " not in message:
        return
    assert "rows that reach the layer" in said
    name, _, value = said.split("Pass ")[1].split(";")[0].partition("=")
    options = {name: int(value) if name == "valid_vocab_size" else float(value)}
    head = headwater.torch.attach(client, "planted", layer_of(model), model=model, **options)
    assert head.checked == "forward"
    loss_is_the_models(head, model)
    head.delete()


def loss_is_the_models(head, model):
    tolerance = 1e-5 if head.spec.data_type == "float32" else 3e-2
    rows = []
    hook = layer_of(model).register_forward_pre_hook(lambda _, arguments: rows.append(arguments[0].detach()))
    with torch.no_grad():
        expected = float(model(input_ids=IDS, labels=IDS).loss)
        hook.remove()
        mine = float(headwater.torch.CrossEntropyLoss(head)(rows[0][:, :-1], IDS[:, 1:]))
    assert abs(mine - expected) <= tolerance * expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_final_norm_between_body_and_layer_is_named(client, dtype):
    """Found by value: the head is the model's for the rows that reach the layer alone."""
    model = Model(dtype, before=norm)
    with pytest.warns(UserWarning, match="rows that reach the layer are not those that model returns"):
        head = headwater.torch.attach(client, "planted", model.lm_head, model=model)
    loss_is_the_models(head, model)
    head.delete()
    model = Model(dtype, before=lambda hidden: hidden / 4)  # as MiniCPM
    with pytest.warns(UserWarning, match=r"multiplies them by 0\.25 .* or pass logit_scale=0\.25 for those of model"):
        headwater.torch.attach(client, "planted", model.lm_head, model=model).delete()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        headwater.torch.attach(client, "planted", model.lm_head, model=model, logit_scale=0.25).delete()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_that_are_rounded_to_the_heads_type_are_no_difference(client, dtype):
    model, options = Model(torch.float32), {"dtype": str(dtype).partition(".")[2], "trainable": False}
    for _ in range(2):
        head = headwater.torch.attach(client, "planted", model.lm_head, model=model, **options)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))
    with refused("HEAD_SPEC_MISMATCH", headwater.AlreadyExistsError):
        headwater.torch.attach(client, "planted", model.lm_head, model=model, **options)
    head.delete()


# ---- check=: the model's own loss ------------------------------------------------------------------------------------------


class Hidden(Model):
    """One whose forward takes no ids by their usual name, so that it cannot run by itself."""

    def forward(self, data, labels):
        return super().forward(data, labels)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_batch_compares_losses_where_the_model_does_not_run_by_itself(client, dtype):
    inputs = {"data": BATCH["input_ids"], "labels": BATCH["labels"]}
    right, wrong = Hidden(dtype), Hidden(dtype, behind=lambda x: 0.125 * x)
    head = headwater.torch.attach(client, "planted", right.lm_head, model=right, check=inputs)
    assert head.checked == "batch"
    before = client.heads()
    with refused("INVALID_COMBINATION", ValueError, "the model's loss of the batch is 4.", "the head's"):
        headwater.torch.attach(client, "other", wrong.lm_head, model=wrong, check=inputs)
    assert client.heads() == before  # the head that the call has created is gone
    head.delete()
    # Its own batch finds what is planted in a head that was there, too: here by a column that no row of the check asks for.
    headwater.torch.attach(client, "planted", wrong.lm_head, model=wrong, check=inputs, logit_scale=0.125).delete()


def test_a_loss_that_is_not_shifted_is_refused(client):
    class Unshifted(Model):
        def forward(self, input_ids, labels=None):
            logits = self.lm_head(self.model(input_ids))
            loss = None if labels is None else torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return {"loss": loss, "logits": logits}

    class Auxiliary(Model):
        def forward(self, input_ids, labels=None):
            output = super().forward(input_ids, labels)
            return output if labels is None else (output.loss + 0.1, output.logits)

    for build, message in ((Unshifted, "without a shift"), (Auxiliary, "further parts")):
        model = build(torch.float32)
        told = "the model's loss is not the shifted cross entropy of its logits"
        with refused("INVALID_COMBINATION", ValueError, told, message):
            headwater.torch.attach(client, "planted", model.lm_head, model=model, check=BATCH)


def test_a_batch_that_cannot_be_compared_is_refused(client):
    model = Model(torch.float32)
    for check in ([], {"input_ids": IDS}):
        with refused("INVALID_FIELD", ValueError):
            headwater.torch.attach(client, "planted", model.lm_head, model=model, check=check)
    for arguments in ({"model": None}, {"model": torch.nn.Linear(2, 2)}):
        with refused("INVALID_COMBINATION", ValueError):
            headwater.torch.attach(client, "planted", model.lm_head, check=BATCH, **arguments)
    assert not [info for info in client.heads() if "planted" in info.name]


def test_a_batch_of_a_run_that_goes_on_is_compared_with_the_layers_own_weight(client):
    """A head that was trained has other weights than the layer it was made from."""
    model = Model(torch.float32)
    options = {"model": model, "check": BATCH, "optimizer": headwater.AdamW()}
    head = headwater.torch.attach(client, "planted", model.lm_head, **options)
    rows = model.model(IDS)
    headwater.torch.CrossEntropyLoss(head)(rows[:, :-1], BATCH["labels"][:, 1:]).backward()
    head.apply_optimizer_step(learning_rate=0.1, expected_micro_batches=1)
    assert not headwater.torch.attach(client, "planted", model.lm_head, **options).created
    head.delete()


# ---- a forward that must not be tried --------------------------------------------------------------------------------------


@pytest.mark.parametrize("attribute", ("_is_flat_param", "ds_id"))
def test_a_sharded_model_is_not_run(client, attribute):
    """It would wait for ranks that do not attach."""

    def never(_):
        raise AssertionError("the model was run")

    model = Model(torch.float32, before=never)
    setattr(model.model[1].weight, attribute, True)
    with pytest.warns(UserWarning, match=r"parameters are sharded.*Only its config was looked at"):
        head = headwater.torch.attach(client, "planted", model.lm_head, model=model)
    assert head.checked == "config"
    head.delete()


# ---- nothing of the model changes ------------------------------------------------------------------------------------------


def test_the_forward_leaves_no_trace(client):
    class Careless(Model):
        def __init__(self, dtype):
            super().__init__(dtype)
            self.register_buffer("calls", torch.zeros(()))
            self.model[1].eval()

        def forward(self, input_ids, labels=None):
            self.calls += 1
            torch.rand(3)
            return super().forward(torch.where(torch.rand(input_ids.shape) < 2, input_ids, 0), labels)

    model = Careless(torch.float32)
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    headwater.torch.attach(client, "planted", model.lm_head, model=model, check=BATCH).delete()
    assert torch.equal(torch.get_rng_state(), state) and float(model.calls) == 0
    assert [module.training for module in model.modules()] == modes and not all(modes) and any(modes)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.lm_head._forward_hooks and not model.lm_head._forward_pre_hooks
