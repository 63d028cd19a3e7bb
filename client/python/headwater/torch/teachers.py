"""Teachers that are asked for rows while a student trains: in this process, or in another one.

    with headwater.connect("gpu7:50051") as client:              # the teacher's process
        headwater.torch.teachers.serve_teacher(teacher, client, "unix:/run/teacher.sock", tokenizer_size=len(tokenizer))

    teacher = headwater.torch.teachers.JoinedTeacher("unix:/run/teacher.sock")                          # the trainer's
    trainer = headwater.trl.RemoteDistillationTrainer(student, teacher, ...)

Token ids go to the teacher's process, and its rows to the server, where the student's join them. The models are those of
transformers, which is not imported here.
"""

from __future__ import annotations

import json
import multiprocessing.connection
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from headwater._client import Client
from headwater._errors import FailedPreconditionError, invalid_argument, must_be, refused
from headwater._head import Head
from headwater.torch._attach import attach
from headwater.torch._layer_rows import only_rows, rows_of


@dataclass(frozen=True)
class Question:
    """Tokens of a micro-batch whose next-token distributions a teacher is asked for."""

    input_ids: torch.Tensor  # (batch, tokens) int64
    attention_mask: torch.Tensor  # (batch, tokens) int64
    asked: torch.Tensor  # (batch, completion tokens) bool: of the last tokens, those whose own distribution is asked for
    inputs: dict[str, Any]  # further inputs of the model: images


@dataclass(frozen=True)
class Answer:
    """A teacher's rows: here, or on their way to the server under a key."""

    rows: torch.Tensor | None = None  # (asked tokens, hidden_size)
    join_key: str | None = None


class Teacher(Protocol):
    """The interface of a teacher for `RemoteDistillationTrainer`."""

    def head(self, client: Client, student: Head) -> Head:
        """The frozen head of the teacher, of the same client as the student's."""

    def ask(self, question: Question) -> Callable[[], Answer]:
        """Begins to compute rows; the function waits for them."""


def completion_rows(model: torch.nn.Module, layer: torch.nn.Module, question: Question) -> torch.Tensor:
    """The rows that enter a model's output layer, (batch, completion tokens, hidden_size): each row predicts its token."""
    with rows_of(layer, False) as came:
        model(input_ids=question.input_ids, attention_mask=question.attention_mask, use_cache=False, **question.inputs)
    rows = only_rows(came)[:, :-1]
    return rows[:, rows.shape[1] - question.asked.shape[1] :]


def rows_asked(model: torch.nn.Module, question: Question) -> torch.Tensor:
    """The rows of the tokens that are asked for, (asked tokens, hidden_size)."""
    rows = completion_rows(model, model.get_output_embeddings(), question)  # type: ignore[operator]
    return rows[question.asked.to(rows.device)]


class LocalTeacher:
    """A teacher whose body runs in the trainer; its output layer is a frozen head on the server.

    Args:
        model: a causal language model of transformers. Its parameters are frozen, and it is put into evaluation mode.
        name: of the head, which is made of the model's output layer.
        options: those of `headwater.torch.attach`: softcap, logit_scale, dtype, ... valid_vocab_size is the student's.
    """

    def __init__(self, model: torch.nn.Module, name: str = "teacher", **options: Any):
        self._model = model.eval().requires_grad_(False)
        self._name = name
        self._options = options

    def head(self, client: Client, student: Head) -> Head:
        return teacher_head(client, self._model, self._name, student.spec.valid_size, **self._options)

    def ask(self, question: Question) -> Callable[[], Answer]:
        with torch.no_grad():
            rows = rows_asked(self._model, question)
        return lambda: Answer(rows=rows)


def teacher_head(client: Client, model: torch.nn.Module, name: str, tokenizer_size: int | None, **options: Any) -> Head:
    """A frozen head of a model's output layer, whose valid columns are the tokenizer's."""
    layer = model.get_output_embeddings()  # type: ignore[operator]
    if tokenizer_size is not None and tokenizer_size < layer.weight.shape[0]:
        options.setdefault("valid_vocab_size", tokenizer_size)
    return attach(client, name, layer, model=model, trainable=False, **options)


class JoinedTeacher:
    """A teacher in another process, which `serve_teacher` runs. Only token ids go there; its rows go to the server.

    Args:
        address: of the teacher's process: "unix:/path", or "host:port" with `authkey`.
        authkey: the secret of both sides; it authenticates the connection at the beginning, and does not encrypt it.
    """

    def __init__(self, address: str, *, authkey: bytes | None = None):
        self._connection = multiprocessing.connection.Client(_address(address, authkey), authkey=authkey)
        self._name, self._prefix, self._count = json.loads(self._connection.recv_bytes())["head"], uuid.uuid4().hex, 0

    def head(self, client: Client, student: Head) -> Head:
        return client.head(self._name)

    def ask(self, question: Question) -> Callable[[], Answer]:
        if question.inputs:
            raise refused(
                f"a teacher in another process takes token ids alone, not {', '.join(question.inputs)}: use LocalTeacher", "teacher"
            )
        if not bool(question.asked.any()):
            return lambda: Answer()
        self._count += 1
        key = f"{self._prefix}/{self._count}"
        _send(self._connection, key, question)

        def wait() -> Answer:
            answer = json.loads(self._connection.recv_bytes())
            if "error" in answer:
                raise FailedPreconditionError(f"the teacher's process failed: {answer['error']}", reason="JOIN_INCOMPLETE")
            return Answer(join_key=key)

        return wait


def serve_teacher(
    model: torch.nn.Module,
    client: Client,
    address: str,
    *,
    name: str = "teacher",
    tokenizer_size: int | None = None,
    authkey: bytes | None = None,
    ready: Callable[[], Any] | None = None,
    **options: Any,
) -> None:
    """Runs a teacher in this process for `JoinedTeacher`s of others, until it is interrupted.

        with headwater.connect("gpu7:50051") as client:
            serve_teacher(teacher, client, "unix:/run/teacher.sock", tokenizer_size=len(tokenizer))

    Args:
        model: a causal language model of transformers, whose output layer becomes a frozen head.
        client: of the server that the student's head is on.
        address: where trainers connect: "unix:/path", or "host:port" with `authkey`.
        name: of the head.
        tokenizer_size: number of tokens of the tokenizer, where the model's vocabulary is padded. None: the model's.
        authkey: as in `JoinedTeacher`.
        ready: called when trainers can connect.
        options: those of `headwater.torch.attach`.
    """
    model = model.eval().requires_grad_(False)
    head = teacher_head(client, model, name, tokenizer_size, **options)
    lock = threading.Lock()  # one forward at a time
    with multiprocessing.connection.Listener(_address(address, authkey), authkey=authkey) as listener:
        if ready is not None:
            ready()
        while True:
            try:
                connection = listener.accept()
            except (EOFError, OSError, multiprocessing.AuthenticationError):
                continue  # one that did not know the key, or has gone
            threading.Thread(target=_serve, args=(connection, model, client, head, lock), daemon=True).start()


def _serve(connection: Any, model: torch.nn.Module, client: Client, head: Head, lock: threading.Lock) -> None:
    device = next(model.parameters()).device
    with connection:
        connection.send_bytes(json.dumps({"head": head.name}).encode())
        while True:
            try:
                key, question = _receive(connection, device)
            except EOFError:
                return
            answer: dict[str, str] = {}
            try:
                with lock, torch.no_grad():
                    rows = rows_asked(model, question)
                client.teacher(key, total_rows=rows.shape[0], tenant=head.name.split("/")[1]).stream(rows)
            except Exception as error:
                answer["error"] = f"{type(error).__name__}: {error}"
            connection.send_bytes(json.dumps(answer).encode())


def _address(address: str, authkey: bytes | None) -> Any:
    if address.startswith("unix:"):
        return address.removeprefix("unix:")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise must_be("address", '"unix:/path" or "host:port"', address)
    if authkey is None:
        raise invalid_argument(
            "MISSING_FIELD", f"a teacher at {address} can be reached from elsewhere: pass authkey=", field="authkey"
        )
    return host, int(port)


def _send(connection: Any, key: str, question: Question) -> None:
    ids, mask, asked = question.input_ids, question.attention_mask, question.asked
    connection.send_bytes(json.dumps({"key": key, "shape": list(ids.shape), "asked": asked.shape[1]}).encode())
    connection.send_bytes(ids.cpu().numpy().astype("<i4").tobytes())
    for flags in (mask, asked):
        connection.send_bytes(flags.cpu().numpy().astype(np.uint8).tobytes())


def _receive(connection: Any, device: torch.device) -> tuple[str, Question]:
    described = json.loads(connection.recv_bytes())
    batch, tokens = described["shape"]
    ids = np.frombuffer(connection.recv_bytes(), "<i4").reshape(batch, tokens).astype(np.int64)
    mask = np.frombuffer(connection.recv_bytes(), np.uint8).reshape(batch, tokens).astype(np.int64)
    asked = np.frombuffer(connection.recv_bytes(), np.uint8).reshape(batch, described["asked"]).astype(bool)
    ids, mask, asked = (torch.from_numpy(values).to(device) for values in (ids, mask, asked))
    return described["key"], Question(ids, mask, asked, {})
