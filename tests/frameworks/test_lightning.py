"""`headwater.lightning` under the Trainers of `lightning` and `pytorch_lightning`, beside the same modules without it."""

import functools
import importlib

import pytest
import torch
from tiny_llama import ACCUMULATE, HIDDEN_SIZE, STEPS, VOCAB_SIZE, batches, tiny

import headwater
from headwater.lightning import HeadwaterCallback, HeadwaterConfig, HeadwaterMixin

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


@functools.cache
def modules(package):
    """The classes of modules of a package's tree."""
    base = importlib.import_module(package).LightningModule

    class Steps(base):
        def __init__(self):
            super().__init__()
            self.losses = []

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.1, betas=(0.8, 0.95))
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class OfTransformers(Steps):
        def __init__(self, tied=False):
            super().__init__()
            self.model = tiny(tied)

        def training_step(self, batch, index):
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch, index):
            self.log("validation", self.model(**batch).loss)

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE)
            self.body = torch.nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE)

        def forward(self, ids):
            return torch.tanh(self.body(self.embedding(ids)))

    class OfOnesOwn(HeadwaterMixin, Steps):
        def __init__(self, config=None):
            super().__init__()
            torch.manual_seed(0)
            self.network = Network()
            self.lm_head = torch.nn.Linear(HIDDEN_SIZE, VOCAB_SIZE)
            self.headwater = config

        def get_output_embeddings(self):
            return self.lm_head

        def configure_callbacks(self):
            return super().configure_callbacks() if self.headwater else []

        def training_step(self, batch, index):
            loss = self.remote_loss(self.network(batch["input_ids"]), batch["labels"])
            self.losses.append(loss.item())
            return loss

    return {"transformers": OfTransformers, "own": OfOnesOwn}


def fit(package, folder, module, callbacks=(), ckpt_path=None, **options):
    pl = importlib.import_module(package)
    trainer = pl.Trainer(
        **{
            "default_root_dir": folder,
            "accelerator": "cpu",
            "max_steps": STEPS,
            "accumulate_grad_batches": ACCUMULATE,
            "gradient_clip_val": 0.5,
            "callbacks": list(callbacks),
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        }
    )
    loader = torch.utils.data.DataLoader(batches(), batch_size=None)
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return trainer


def close(first, second, tolerance=1e-5):
    assert len(first) == len(second)
    assert torch.allclose(torch.tensor(first), torch.tensor(second), rtol=0, atol=tolerance), (first, second)


@pytest.fixture(params=PACKAGES)
def package(request):
    return request.param


@pytest.fixture
def config(client):
    """The configuration of a head that only this test has."""
    return HeadwaterConfig(client=client, head=f"head-{len(client.heads())}")


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_transformers_trains_as_without(package, config, tmp_path, tied):
    kinds = modules(package)
    stock, ours = kinds["transformers"](tied), kinds["transformers"](tied)
    fit(package, tmp_path, stock)
    callback = HeadwaterCallback(config)
    fit(package, tmp_path, ours, [callback])
    close(stock.losses, ours.losses)
    assert stock.losses[0] - stock.losses[-4] > 0.1  # it has learnt, of the same batch
    # Outside of fit the layer is the module's again, with what the head has learnt.
    assert callback.remote is None
    batch = batches(1)[0]
    assert ours.model(batch["input_ids"]).logits.shape[-1] == VOCAB_SIZE
    close([stock.model(**batch).loss.item()], [ours.model(**batch).loss.item()])
    assert ours.model.lm_head.weight.requires_grad


def test_a_network_of_ones_own_trains_as_without(package, config, tmp_path):
    own = modules(package)["own"]
    stock, ours = own(), own(config)
    fit(package, tmp_path, stock)
    fit(package, tmp_path, ours)
    close(stock.losses, ours.losses)
    assert stock.losses[0] - stock.losses[-4] > 0.1
    for first, second in zip(stock.parameters(), ours.parameters(), strict=True):
        assert torch.allclose(first, second, rtol=0, atol=1e-5)


def test_a_frozen_head(package, config, tmp_path):
    kinds = modules(package)
    stock, ours = kinds["transformers"](), kinds["transformers"]()
    for module in (stock, ours):
        module.model.lm_head.requires_grad_(False)
    fit(package, tmp_path, stock)
    callback = HeadwaterCallback(config)
    fit(package, tmp_path, ours, [callback])
    close(stock.losses, ours.losses)


def test_a_checkpoint_has_the_trained_weight_and_its_run_goes_on(package, config, client, tmp_path):
    kinds = modules(package)
    pl = importlib.import_module(package)
    whole = kinds["transformers"]()
    fit(package, tmp_path, whole)

    def saved(every, **options):
        keep = pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=every, save_top_k=-1)
        return {"callbacks": [HeadwaterCallback(config), keep], "enable_checkpointing": True, **options}

    first = kinds["transformers"]()
    fit(package, tmp_path, first, **saved(2))
    path = tmp_path / "step=4.ckpt"
    checkpoint = torch.load(path, weights_only=False)
    weight = checkpoint["state_dict"]["model.lm_head.weight"]
    assert not torch.equal(weight, tiny().lm_head.weight)
    # The head has gone on to the end: the run that continues takes it back.
    second = kinds["transformers"]()
    fit(package, tmp_path, second, ckpt_path=path, **saved(100))
    close(whole.losses, first.losses[: 4 * ACCUMULATE] + second.losses)
    head = client.head(config.head)
    head.restore("step-4")
    assert torch.equal(torch.from_numpy(head.weight().copy()), weight)


def manual(module):
    module.automatic_optimization = False


def two_optimizers(module):
    module.automatic_optimization = True
    module.configure_optimizers = lambda: [torch.optim.SGD(module.parameters(), lr=0.1)] * 2


def adagrad(module):
    module.configure_optimizers = lambda: torch.optim.Adagrad(module.parameters(), lr=0.1)


def clips_itself(module):
    module.__class__ = type("Clips", (type(module),), {"configure_gradient_clipping": lambda self, *args: None})


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (None, {"gradient_clip_algorithm": "value"}, "gradient_clip_algorithm"),
        (manual, {"gradient_clip_val": None, "accumulate_grad_batches": 1}, "automatic_optimization"),
        (adagrad, {}, "Adagrad"),
        (clips_itself, {}, "configure_gradient_clipping"),
        (None, {}, "lr_find"),
    ],
    ids=["by value", "manual", "optimizer", "own clipping", "tuner"],
)
def test_what_a_head_cannot_follow_is_refused(package, config, tmp_path, change, options, words):
    module = modules(package)["transformers"]()
    if change is not None:
        change(module)
    callbacks = [HeadwaterCallback(config)]
    if words == "lr_find":
        module.lr = 0.1
        callbacks.append(importlib.import_module(package).callbacks.LearningRateFinder(num_training_steps=2))
    with pytest.raises(headwater.InvalidArgumentError, match=words):
        fit(package, tmp_path, module, callbacks, **options)


def test_a_loss_that_is_not_the_heads_stops_the_first_step(package, config, tmp_path):
    module = modules(package)["transformers"]()
    module.training_step = lambda batch: module.model.model(batch["input_ids"]).last_hidden_state.square().mean()
    before = [parameter.clone() for parameter in module.parameters()]
    with pytest.raises(headwater.FailedPreconditionError, match="no loss of"):
        fit(package, tmp_path, module, [HeadwaterCallback(config)])
    assert all(torch.equal(first, second) for first, second in zip(before, module.parameters(), strict=True))
