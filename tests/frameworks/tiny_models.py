"""Tiny models of every class of the installed transformers that has an output head.

Classes are enumerated from transformers' own tables, not from a list here. A class's default configuration is shrunk field by
field, nested configurations included. The model is made of it with random weights.

    for cls in causal_lm_classes():
        model = build(cls)                     # raises NotBuilt, whose text is the reason
        ids, labels = batch(model)

    python tiny_models.py                      prints which classes cannot be built, and why

HEADWATER_TEST_CLASSES names the classes that are enumerated, separated by spaces; without it, they are all.
"""

import contextlib
import copy
import dataclasses
import inspect
import os
import re
import sys
import warnings

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

VOCABULARY = 97
HIDDEN = 32
HEADS = 4
HEAD = HIDDEN // HEADS
POSITIONS = 128
MAX_PARAMETERS = 6_000_000
# Ids of special tokens are below the first that `batch` draws.
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FIRST_ID = 40

# Each table of transformers whose classes may have an output head; CAUSAL_LM first.
TABLES = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING",
    "MODEL_FOR_PRETRAINING_MAPPING",
)


class NotBuilt(Exception):
    """A class that has no tiny model here; the text is the outcome, "not built: why" or "no head"."""


# (pattern of a field's name, its value): the first that matches decides. A value that is already smaller stays.
SIZES = [
    (r"type_vocab_size", 2),
    (r"(.*_)?vocab_size.*|.*num_embeddings|n_tokens|encoder_hash_byte_group_vocab", VOCABULARY),
    (
        r"((num_)?(max_)?(source_|target_|.*_)?position(s|_embeddings)|n_positions|n_ctx|max_seq_len|max_sequence_length|seq_length"
        r"|block_size|max_length|context_length)",
        POSITIONS,
    ),
    (r".*(num_key_value_heads|kv_heads|kv_n_heads|num_kv_heads|key_value_heads)", HEADS // 2),
    (r".*(num_.*heads|n_.*heads?|attention_heads|num_heads)", HEADS),
    (r".*(num_.*layers|n_layers?|encoder_layers|decoder_layers|num_.*blocks|depth|.*_layers)|num_self_attends_per_block", 2),
    (r".*head_dim(ension)?|d_kv|d_head|dim_head|kv_channels|rotary_dim|attention_head_size|head_size", HEAD),
    (r".*(experts_per_tok(en)?|num_selected_experts|moe_topk|moe_k|top_k_experts|topk_method|num_experts_per.*|top_k)", 2),
    (r".*(n|num)_.*experts.*|.*num_experts|zero_expert_num", 4),
    (r"n_group|topk_group|n_groups", 1),
    (r".*lora_rank", 16),
    (r".*(intermediate|ffn|inner|mlp|d_ff|dff|dim_ff|feed_?forward).*(size|dim)?", 2 * HIDDEN),
    (
        r".*(hidden_size|hidden_dim|d_model|n_embd|embed_dim|embedding_size|embedding_dim|projection_dim|hidden|width|emb_dim|^dim|_dim"
        r"|_size|d_latents|_channels)|conv_dim",
        HIDDEN,
    ),
]

# Fields that stay None in a configuration by default although the model needs them.
NEEDED = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "head_dim": HEAD,
    "num_key_value_heads": HEADS // 2,
    "layer_types": ["full_attention", "full_attention"],
    "mlp_layer_types": ["dense", "dense"],
    "vocabulary_map": {"<image>": 4},
    "deepstack_layer_map": [[0, 0]],
}

# The transforms of logits by config field, as checkpoints have it, where the default does nothing.
LOGITS = {
    "final_logit_softcapping": 30.0,
    "logits_scaling": 8.0,
    "logit_scale": 0.5,
    "lm_head_multiplier": 0.5,
    "lm_head_bias": True,
    "softcap": 30.0,
}

# Exceptions to the rules above, by model_type.
OVERRIDES: dict[str, dict] = {
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": HEADS // 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": HIDDEN},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "ernie4_5_vl_moe_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}},
    "florence_vision": {"embed_dim": [HIDDEN] * 4, "num_heads": [HEADS] * 4, "num_groups": [HEADS] * 4},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_text": {"hidden_size_per_layer_input": 8},
    "git_vision_model": {"image_size": 32, "patch_size": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "molmo2_adapter": {"vision_feature_layer": [0, 1]},
    "muse_spark_audio": {"num_hidden_layers": 4, "hidden_sizes": [HIDDEN] * 4},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local", "lsh"], "num_buckets": 4},
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["hybrid", "linear_attention", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
}


def tiny_config(config_class: type[PretrainedConfig]) -> PretrainedConfig:
    """A configuration of the class whose sizes are tiny."""
    default = vars(config_class())
    values = {}
    for name, given in fields(config_class):
        value = default.get(name)
        if isinstance(value, PretrainedConfig):
            values[name] = tiny_config(type(value))
        elif name in LOGITS and value in (None, 1.0, False):
            values[name] = LOGITS[name]
        elif value is None:
            if name in NEEDED:
                values[name] = NEEDED[name]
        elif name == "rope_parameters":
            small = shrink_rope(value)
            if small != value:
                values[name] = small
        elif given is not None:  # else the class derives it from the others
            small = shrink(name, value)
            if small != value:
                values[name] = small
    if "kv_lora_rank" in default:  # latent attention has no groups
        values["num_key_value_heads"] = HEADS
    values.update(OVERRIDES.get(config_class.model_type, {}))
    return config_class(**values)


def fields(config_class: type[PretrainedConfig]) -> list[tuple[str, object]]:
    """Names and defaults of what a configuration is made of: fields of a dataclass, arguments before transformers 5."""
    if dataclasses.is_dataclass(config_class):
        return [(field.name, field.default) for field in dataclasses.fields(config_class) if field.init and field.name[0] != "_"]
    parameters = list(inspect.signature(config_class.__init__).parameters.values())[1:]
    return [(parameter.name, parameter.default) for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]


def shrink(name: str, value):
    """The value that a tiny configuration has in the field."""
    if isinstance(value, list | tuple) and name == "conv_dim":
        return type(value)(shrink(name, part) for part in value)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 1:
        return value
    if re.search(r"token_(id|index)$|_token$", name):
        return SPECIAL.get(name, 4 + sum(name.encode()) % (FIRST_ID - 4))
    for pattern, size in SIZES:
        if re.fullmatch(pattern, name):
            return min(value, size)
    return value


def shrink_rope(value):
    """Rotary parameters for a tiny head, nested ones by the kind of layer included."""
    if isinstance(value, dict):
        return {
            name: [HEAD // 2 - 2 * (HEAD // 8), HEAD // 8, HEAD // 8] if name == "mrope_section" else shrink_rope(part)
            for name, part in value.items()
        }
    return value


def table(name: str) -> list[type[PreTrainedModel]]:
    """The classes of one table, in its order; only those that HEADWATER_TEST_CLASSES names, if it is set."""
    selection = os.environ.get("HEADWATER_TEST_CLASSES", "").split()
    names: dict[str, None] = {}
    for entry in getattr(modeling_auto, f"{name}_NAMES").values():
        names.update(dict.fromkeys([entry] if isinstance(entry, str) else entry))
    return [getattr(transformers, name) for name in names if not selection or name in selection]


def causal_lm_classes() -> list[type[PreTrainedModel]]:
    """Every class for causal language models."""
    return table(TABLES[0])


def output_classes() -> list[type[PreTrainedModel]]:
    """Every class that may have an output head."""
    return list(dict.fromkeys(cls for name in TABLES for cls in table(name)))


def build(cls: type[PreTrainedModel], dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A tiny model of the class in evaluation mode, with random weights that the seed fixes. Raises NotBuilt."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = tiny_config(cls.config_class)
            with torch.device("meta"):
                shape = cls(copy.deepcopy(config))
            if not isinstance(getattr(shape.get_output_embeddings(), "weight", None), torch.Tensor):
                raise NotBuilt("no head")
            parameters = sum(parameter.numel() for parameter in shape.parameters())
            if parameters > MAX_PARAMETERS:
                raise NotBuilt(f"not built: {parameters} parameters, at most {MAX_PARAMETERS}")
            torch.manual_seed(seed)
            model = cls(config).eval()
    except NotBuilt:
        raise
    except Exception as error:
        raise NotBuilt(f"not built: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
    randomise(model, seed)
    return model.to(dtype)


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Gives the head random weights, and a bias other than zero.

    Where the model runs on ids alone, the head is scaled until the largest logits are 4 to 7, as those of a checkpoint are.
    """
    head = model.get_output_embeddings()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        head.weight.normal_(0, 2 / head.weight.shape[1] ** 0.5, generator=generator)
        if getattr(head, "bias", None) is not None:
            head.bias.normal_(0, 0.5, generator=generator)
        with contextlib.suppress(Exception):
            logits = model(input_ids=batch()[0]).logits
            head.weight.mul_(2 / logits.std())


def batch(rows: int = 2, length: int = 12, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids of no special token, and labels of which some are ignored; both of shape (rows, length)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(FIRST_ID, VOCABULARY - 1, (rows, length), generator=generator)
    labels = ids.clone()
    labels[0, :3] = -100
    labels[-1, -2] = -100
    return ids, labels


class Outcomes:
    """Classes by outcome. `add(name, "refused: why")` prints it and puts it into `outcomes["refused"]`, reasons by name."""

    def __init__(self) -> None:
        self._by_kind: dict[str, dict[str, str]] = {}
        self.complete = "HEADWATER_TEST_CLASSES" not in os.environ

    def add(self, name: str, outcome: str) -> None:
        print(f"{name}: {outcome}", flush=True)
        kind, _, reason = outcome.partition(": ")
        self._by_kind.setdefault(kind, {})[name] = reason

    def __getitem__(self, kind: str) -> dict[str, str]:
        return self._by_kind.get(kind, {})

    def __str__(self) -> str:
        return ", ".join(f"{kind} {len(names)}" for kind, names in self._by_kind.items())


def main() -> int:
    transformers.logging.set_verbosity_error()
    outcomes = Outcomes()
    for cls in output_classes():
        try:
            build(cls)
            outcomes.add(cls.__name__, "built")
        except NotBuilt as reason:
            outcomes.add(cls.__name__, str(reason))
    print(outcomes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
