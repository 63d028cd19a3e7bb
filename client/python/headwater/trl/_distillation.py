"""TRL's stable DistillationTrainer with the divergence computed by remote heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from trl import DistillationTrainer

import headwater
from headwater._errors import invalid_argument, refused
from headwater.torch import JSDLoss
from headwater.torch._remote_head import HeadwaterConfig, RemoteHead
from headwater.torch.teachers import Answer, LocalTeacher, Question, Teacher, completion_rows
from headwater.transformers._trainer import attach
from headwater.trl._fused_head import IGNORED, labelled
from headwater.trl._setup import base_model, train_with

_MULTIMODAL = (
    "pixel_values",
    "image_grid_thw",
    "pixel_attention_mask",
    "spatial_shapes",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


class RemoteDistillationTrainer(DistillationTrainer):
    """On-policy distillation as TRL's stable `DistillationTrainer` does it, over remote heads. It is the exact divergence over the
    full vocabulary, with a teacher in this process, or in another one.

        trainer = RemoteDistillationTrainer(
            model=student, teacher=JoinedTeacher("unix:/run/teacher.sock"), config=HeadwaterConfig(server="gpu7:50051"),
            args=DistillationConfig(output_dir="student", beta=0.5), train_dataset=prompts, processing_class=tokenizer,
        )
        trainer.train()

    beta and temperature are those of `DistillationConfig`; there is no factor of the temperature's square, as in TRL. Vocabularies
    are compared by the tokenizer's size, not by the models' padded ones: padding gets no probability on either side.

    Args:
        model: the student, as in TRL.
        teacher: a `JoinedTeacher` or `LocalTeacher`, or a model of transformers, which is the latter. A mapping by name routes
            rows: the dataset's column `teacher_column` names the teacher of each prompt.
        args: a `trl.DistillationConfig`.
        config: of the student's head.
        teacher_column: name of the column, with several teachers.
        kwargs: further arguments of TRL's class: train_dataset, eval_dataset, processing_class, callbacks, peft_config, ...
    """

    def __init__(
        self,
        model: Any,
        teacher: Teacher | PreTrainedModel | Mapping[str, Teacher | PreTrainedModel],
        args: Any = None,
        *,
        config: HeadwaterConfig | None = None,
        teacher_column: str = "teacher",
        **kwargs: Any,
    ):
        for name in ("teacher_model", "teacher_model_name_or_path", "teacher_model_revision", "teacher_model_init_kwargs"):
            if kwargs.get(name) is not None or getattr(args, name, None) is not None:
                raise refused(f"{name} is TRL's own teacher: pass teacher= instead", name)
        super().__init__(model, None, args, **kwargs)
        named = dict(teacher) if isinstance(teacher, Mapping) else {"": teacher}
        if not named:
            raise refused("teacher must have one teacher or more", "teacher")
        self._teacher_names = list(named)
        self._teacher_column = teacher_column
        self._teachers = [
            LocalTeacher(one, f"teacher-{name}" if name else "teacher") if isinstance(one, PreTrainedModel) else one
            for name, one in named.items()
        ]
        self.remote_head = self._attach(config or HeadwaterConfig())
        client, student = self.remote_head.config.connect(), self.remote_head.head
        self._losses = [self._loss(one.head(client, student)) for one in self._teachers]
        train_with(self, self.remote_head)

    def _attach(self, config: HeadwaterConfig) -> RemoteHead:
        """The student's head, whose valid columns are the tokenizer's, and which has a slot for each teacher's part of a loss."""
        model = base_model(self, self.model)
        columns, tokens = model.get_output_embeddings().weight.shape[0], len(self._tokenizer)
        changes: dict[str, Any] = {}
        if config.valid_vocab_size is None and tokens < columns:
            changes["valid_vocab_size"] = tokens
        if config.staging_slots is None and len(self._teachers) > 1:
            changes["staging_slots"] = len(self._teachers)
        return attach(self, model, dataclasses.replace(config, **changes))

    def _loss(self, teacher_head: headwater.Head) -> JSDLoss:
        student = self.remote_head.head
        if teacher_head.spec.valid_size != student.spec.valid_size:
            raise invalid_argument(
                "VOCAB_SIZE_MISMATCH",
                f"the teacher's head {teacher_head.name} has {teacher_head.spec.valid_size} valid columns, the student's "
                f"{student.spec.valid_size}; the tokenizer has {len(self._tokenizer)} tokens. Serve the teacher with "
                f"tokenizer_size={student.spec.valid_size}",
                field="teacher",
                expected=student.spec.valid_size,
                actual=teacher_head.spec.valid_size,
            )
        return JSDLoss(
            student,
            teacher_head,
            reduction="sum",
            ignore_index=IGNORED,
            beta=self.beta,
            temperature=self.temperature,
            timeout_s=self.remote_head.config.timeout_s,
        )

    # ---- which teacher a row has ------------------------------------------------------------------------------------

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if len(self._teachers) > 1 and self._teacher_column not in self._signature_columns:
            self._signature_columns = [*self._signature_columns, self._teacher_column]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if len(self._teachers) > 1:
            output["teacher_index"] = torch.tensor([self._index_of(row) for row in inputs], device=output["completion_ids"].device)
        return output

    def _index_of(self, row: Mapping[str, Any]) -> int:
        name = row.get(self._teacher_column)
        if name not in self._teacher_names:
            raise invalid_argument(
                "INVALID_FIELD",
                f"a row of the dataset has {self._teacher_column}={name!r}; teachers are {', '.join(self._teacher_names)}",
                field=self._teacher_column,
            )
        return self._teacher_names.index(name)

    # ---- the loss ---------------------------------------------------------------------------------------------------

    def _compute_loss(self, unwrapped_student: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> tuple[Any, Any, Any]:
        """Loss, sum of the student's entropies and number of tokens, as TRL's own method returns them."""
        mask = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        mask = mask != 0
        question = Question(
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            mask,
            {name: inputs[name] for name in _MULTIMODAL if name in inputs},
        )
        masks = [mask]
        if len(self._teachers) > 1:
            masks = [mask & (inputs["teacher_index"] == index)[:, None] for index in range(len(self._teachers))]
        # The teachers compute while the student does.
        answers = [one.ask(dataclasses.replace(question, asked=asked)) for one, asked in zip(self._teachers, masks, strict=True)]
        rows = completion_rows(unwrapped_student, self.remote_head.layer, question)
        if torch.is_grad_enabled():
            self.remote_head.count_loss()
        loss = rows.new_zeros((), dtype=torch.float32)
        for loss_fn, asked, answer in zip(self._losses, masks, answers, strict=True):
            loss = loss + self._divergence(loss_fn, rows, inputs["completion_ids"], asked, answer())
        count = mask.sum()
        loss = loss / (count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch.to(loss.device))
        return loss, self._entropy_sum(rows, inputs["completion_ids"], mask), count

    @staticmethod
    def _divergence(
        loss_fn: JSDLoss, rows: torch.Tensor, tokens: torch.Tensor, asked: torch.Tensor, answer: Answer
    ) -> torch.Tensor:
        asked, tokens = asked.to(rows.device), tokens.to(rows.device)
        chosen, targets = labelled(asked, rows, tokens)
        if answer.join_key is not None:
            return loss_fn(chosen, headwater.JOIN, targets, join_key=answer.join_key, total_rows=chosen.shape[0])
        teacher_rows = answer.rows
        if teacher_rows is None or not teacher_rows.shape[0]:
            teacher_rows = rows.new_zeros(1, loss_fn.teacher.spec.hidden_size)
        return loss_fn(chosen, teacher_rows, targets)

    def _entropy_sum(self, rows: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The entropy of the student's distributions at the temperature, which TRL logs; a forward of the head alone."""
        chosen, targets = labelled(mask, rows, tokens)
        result = self.remote_head.head.cross_entropy(
            chosen.detach(),
            targets,
            temperature=self.temperature,
            outputs=("entropy",),
            backward=False,
            timeout_s=self.remote_head.config.timeout_s,
        )
        return torch.as_tensor(result.entropy).sum().to(rows.device)
