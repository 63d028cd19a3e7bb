"""The points of the study: which way, model and sizes, by part. Points that are compared are in one part."""

from __future__ import annotations

from dataclasses import dataclass, replace

# Its name on the pages, and what it is.
WAYS = {
    "eager": ("PyTorch eager", "PyTorch: logits, and transformers' loss in fp32"),
    "compile": ("torch.compile", "the same loss and its product, compiled"),
    "trl": ("TRL in chunks", "TRL's loss in chunks of rows and columns"),
    "liger": ("Liger", "Liger's fused loss, its other kernels off"),
    "cce": ("CCE", "Cut Cross Entropy"),
    "headwater": ("Headwater", "headwaterd on the trainer's GPU; the server has the head's optimizer"),
    "headwater_local": ("Headwater local", "headwater.local: a server as the trainer's child, on its GPU"),
    "headwater_trainer": (
        "Headwater, weight kept",
        "headwaterd on the trainer's GPU; the trainer's optimizer has the weight: no logits, nothing else moved",
    ),
    "headwater_dithered": ("Headwater, dithered", "as headwater, with gradient_resolution 2**-12"),
    "headwater_second": ("Headwater, second GPU", "headwaterd on a second GPU"),
    "liger_rope": ("Liger's RoPE alone", "Liger's rotary embedding alone, eager's loss"),
    "liger_swiglu": ("Liger's SwiGLU alone", "Liger's SwiGLU alone, eager's loss"),
    "liger_rms": ("Liger's RMSNorm alone", "Liger's RMSNorm alone, eager's loss"),
    "liger_all": ("Liger with all four", "all four of Liger's kernels"),
    "liger_body_headwater": ("Liger's body, Headwater's head", "Liger's body, the head of headwater"),
}
LABELS = {way: label for way, (label, _) in WAYS.items()}


@dataclass(frozen=True)
class Point:
    """One measurement: a process of its own. Sizes are those of one micro-batch; a step has `accumulation` of them."""

    part: str
    way: str
    model: str = "1b"
    batch: int = 1
    context: int = 2048
    accumulation: int = 1
    checkpointing: bool = False
    vocab: int = 128256
    cap_gib: int = 0  # of the trainer and the server together; 0: the card's
    offload: bool = False  # parameters, gradients and optimizer state of the body on the CPU (FSDP2)
    body: bool = True  # without: rows of random numbers, so that the head's part is all there is
    extra_heads: int = 0  # Medusa's: a residual block and a last layer each, beside the model's last layer
    ranks: int = 1  # that shard the model (FSDP2), a process and a GPU each; batch and rows are those of a rank

    @property
    def name(self) -> str:
        """Its case, without the way's measures."""
        words = [self.part, self.model, f"b{self.batch}", f"t{self.context}"]
        words += [f"a{self.accumulation}"] if self.accumulation > 1 else []
        words += [f"v{self.vocab}"] if self.vocab != 128256 else []
        words += ["checkpointed"] if self.checkpointing else []
        return "_".join([*words, self.way])

    @property
    def rows(self) -> int:
        """Tokens of a micro-batch."""
        return self.batch * self.context

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 has the model."""
        return self.offload or self.ranks > 1


COMPARED = ("eager", "compile", "trl", "liger", "cce", "headwater")
BASIC = ("eager", "liger", "headwater")
EXACT, ERRORS = "exact", "errors"  # parts that are no points: exactness.py; the peers' errors on a real model's rows
# In the order of a run, which may be cut short: what a remote head is for comes first.
PARTS = (
    "loss", "long", "cap24", EXACT, ERRORS, "ablation", "vocabularies", "accumulation", "liger", "3b", "medusa", "offload",
    "batches", "contexts", "second_gpu", "fsdp",
)  # fmt: skip
ON_TWO_GPUS = ("second_gpu", "fsdp")

QUANTITIES = ("grad_hidden", "grad_weight", "loss")
# The ways of tests/bench/peers whose errors on the real model's rows are shown, by the study's name.
ERROR_WAYS = {
    "headwater": "headwater_fp32",
    "headwater_dithered": "headwater_tau_2_12",
    "eager": "torch_eager_anew",
    "compile": "torch_compile_anew",
    "liger": "liger_anew",
    "cce": "cce_anew",
}


def in_order(points: list[Point]) -> list[Point]:
    """Points in the order of their parts."""
    return sorted(points, key=lambda point: PARTS.index(point.part))


def all_points() -> list[Point]:
    points = [Point("loss", way, batch=8, vocab=vocab, body=False) for vocab in (50304, 128256) for way in BASIC]
    points += [Point("long", way, context=context, checkpointing=True) for context in (65536, 131072) for way in COMPARED]
    points += [Point("cap24", way, context=16384, checkpointing=True, cap_gib=24) for way in ("eager", "trl", "liger", "headwater")]
    # TRL's function is called outside of the model, whose last layer FSDP2 then has not gathered.
    points += [Point("cap24", way, context=65536, checkpointing=True, cap_gib=24, offload=True) for way in BASIC]
    points += [Point("ablation", way, batch=4) for way in ("eager", "headwater_trainer", "headwater", "headwater_dithered")]
    points += [
        Point("vocabularies", way, batch=4, vocab=vocab) for vocab in (32000, 50304, 256000) for way in ("eager", "headwater")
    ]
    points += [Point("accumulation", way, batch=2, accumulation=count) for count in (1, 8, 32) for way in BASIC]
    liger = ("eager", "liger_rope", "liger_swiglu", "liger_rms", "liger", "liger_all", "headwater", "liger_body_headwater")
    points += [Point("liger", way, batch=4) for way in liger]
    points += [Point("3b", way, model="3b", batch=4, checkpointing=True) for way in ("eager", "liger", "cce", "headwater")]
    points += [Point("medusa", way, batch=4, checkpointing=True, extra_heads=5) for way in BASIC]
    points += [Point("offload", way, batch=4, checkpointing=True, offload=True) for way in BASIC]
    points += [Point("batches", way, batch=batch) for batch in (1, 4, 8, 16) for way in COMPARED]
    points += [Point("batches", "headwater_local", batch=4)]
    points += [Point("contexts", way, context=context, checkpointing=True) for context in (8192, 16384, 32768) for way in COMPARED]
    points += [Point("second_gpu", way, batch=batch) for batch in (1, 8) for way in ("eager", "headwater", "headwater_second")]
    points += [Point("fsdp", way, model="3b", batch=8, checkpointing=True, ranks=2) for way in BASIC]
    return in_order(points)


def smoke_points() -> list[Point]:
    """A few tiny ones, of each kind that a CPU can run."""
    tiny = Point("batches", "eager", model="tiny", batch=2, context=32, vocab=512)
    both = ("eager", "headwater")
    return in_order(
        [
            *(replace(tiny, way=way) for way in (*both, "headwater_local")),
            replace(tiny, part="accumulation", way="headwater_trainer", accumulation=4, checkpointing=True),
            *(replace(tiny, part="loss", way=way, body=False) for way in both),
            *(replace(tiny, part="medusa", way=way, checkpointing=True, extra_heads=5) for way in both),
            *(replace(tiny, part="fsdp", way=way, checkpointing=True, ranks=2) for way in both),
        ]
    )
