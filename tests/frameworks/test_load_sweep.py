"""Every class of transformers with an output head: what it saves is loaded as its head, or refused; never another tensor."""

import shutil

import numpy as np
import tiny_models
import torch

import headwater

# How many of the classes that transformers 5.24 has load without a tensor's name.
AT_LEAST_BUILT = 350
AT_LEAST_RIGHT = 345


def try_to_load(client, folder: str, layer: torch.nn.Module, bias: bool) -> str:
    """Loads the folder into a head of the layer's shape: "right", "wrong: ..." or "refused: ..."."""
    head = client.create_head("sweep", tuple(layer.weight.shape), bias or None, dtype="float32", trainable=False)
    try:
        head.load(folder)
        if not np.array_equal(np.asarray(head.weight()), layer.weight.detach().numpy()):
            return "wrong: the weight is another tensor"
        if not bias:
            return "wrong: the bias is dropped" if getattr(layer, "bias", None) is not None else "right"
        return (
            "right" if np.array_equal(np.asarray(head.bias()), layer.bias.detach().numpy()) else "wrong: the bias is another tensor"
        )
    except headwater.HeadwaterError as error:
        return f"refused: {error}"
    finally:
        head.delete(force=True)


def test_saved_models_load_as_their_head_or_are_refused(remote_client, server):
    outcomes = tiny_models.Outcomes()
    for cls in tiny_models.output_classes():
        name = cls.__name__
        folder = server.load_root / name
        try:
            model = tiny_models.build(cls)
            model.save_pretrained(folder)
        except tiny_models.NotBuilt as reason:
            outcomes.add(name, str(reason))
            continue
        layer = model.get_output_embeddings()
        bias = getattr(layer, "bias", None) is not None
        outcome = try_to_load(remote_client, name, layer, bias)
        if bias and outcome == "right":
            without = try_to_load(remote_client, name, layer, False)
            if not without.startswith("refused"):
                outcome = f"{without}, in a head without one"
        outcomes.add(name, outcome)
        shutil.rmtree(folder)

    print(outcomes)
    assert not outcomes["wrong"]
    if outcomes.complete:
        assert len(outcomes["right"]) + len(outcomes["refused"]) >= AT_LEAST_BUILT
        assert len(outcomes["right"]) >= AT_LEAST_RIGHT
