"""`Client`: a connection to a server. Heads by name."""

from __future__ import annotations

import contextlib
import re
import sys
import time
import uuid
from typing import Any

from headwater import _arrays, _wire
from headwater._errors import HeadwaterError, invalid_argument, make_error, must_be, refused, wrong_shape
from headwater._futures import as_future
from headwater._head import Head
from headwater._loss._requests import check_bool, check_choice
from headwater._loss._teacher import Teacher
from headwater._loss._terms import Handle
from headwater._messages import head_info, head_spec_message
from headwater._remote import RemoteBackend
from headwater._types import SGD, AdamW, HeadInfo, HeadSpec, ServerInfo, check_integer, check_number

# Bounds every call that does not bring its own `timeout_s`, in seconds.
DEFAULT_TIMEOUT_S = 120.0

_ID = r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?"
_FULL_NAME = re.compile(rf"tenants/{_ID}/heads/{_ID}")
_SHORT_NAME = re.compile(_ID)
_LETTERS = "lower-case letters, digits, '.', '_' and '-' (at most 64)"


# How often a client looks whether the weights of a head that another one is creating have come, in seconds.
_WEIGHTS_POLL_S = 0.05


def full_name(name: str, tenant: str = "default") -> str:
    """`tenants/default/heads/student` for `student`; a full name as it is.

    Raises:
        InvalidArgumentError: neither.
    """
    if isinstance(name, str) and _SHORT_NAME.fullmatch(name):
        return f"tenants/{tenant}/heads/{name}"
    if isinstance(name, str) and _FULL_NAME.fullmatch(name):
        return name
    raise must_be("name", f"{_LETTERS}, or tenants/TENANT/heads/HEAD", name, "INVALID_NAME")


def check_tenant(tenant: Any) -> str:
    """The name of a tenant."""
    if not isinstance(tenant, str) or not _SHORT_NAME.fullmatch(tenant):
        raise must_be("tenant", _LETTERS, tenant, "INVALID_NAME")
    return tenant


class Client(Handle):
    """Heads by name. Made by `headwater.connect` or `headwater.local.connect`. Thread-safe; use one for a process.

    Every method `x(...)` has `x_future(...)`, which returns at once a future good for `.result()` and `await`.
    Every method takes `timeout_s`, the bound on the whole call in seconds; None means the client's.

    Raises (any method):
        UnavailableError: the server is not there.
        DeadlineExceededError: it took longer than `timeout_s`.
    """

    _WHY_NOT_PICKLED = "a headwater.Client belongs to its process and cannot be pickled: connect again in the other one"

    def __init__(self, backend: RemoteBackend, *, tenant: str = "default"):
        self._backend = backend
        self._tenant = check_tenant(tenant)
        self._closed = False

    def __repr__(self) -> str:
        return f"<headwater.Client {self._backend.address}, tenant {self._tenant}{', closed' if self._closed else ''}>"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tenant(self) -> str:
        """Whose heads short names mean: `student` is `tenants/{tenant}/heads/student`."""
        return self._tenant

    @property
    def timeout_s(self) -> float:
        """Bound of every call that does not bring its own, in seconds."""
        return self._backend.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._backend.timeout_s = check_number(timeout_s, "timeout_s", low=0, low_open=True)

    def close(self) -> None:
        """Closes the connection, and the session with it: undecided micro-batches are then discarded.

        Heads stay on the server. One of `headwater.local` ends with its last client. Idempotent.
        """
        self._closed = True
        self._backend.close()

    def _timeout(self, timeout_s: float | None) -> float:
        return self.timeout_s if timeout_s is None else check_number(timeout_s, "timeout_s", low=0, low_open=True)

    def create_head(
        self,
        name: str,
        weight: Any,
        bias: Any = None,
        *,
        trainable: bool = True,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        valid_vocab_size: int | None = None,
        optimizer: AdamW | SGD | None = None,
        dtype: Any = None,
        staging_slots: int | None = None,
        initial_step: int = 0,
        parallelism: str = "vocabulary",
        int8_teacher: bool = False,
        if_exists: str = "fail",
        expected_step: int | None = None,
        timeout_s: float | None = None,
    ) -> Head:
        """Creates a head and uploads its weights.

        Logits are `softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap)`, or the argument without `softcap`.

        Args:
            name: `student`, short for `tenants/default/heads/student`.
            weight: (vocab_size, hidden_size), float32, float16 or bfloat16 (numpy, ml_dtypes, torch, `headwater.BFloat16`; uint16
                bits with dtype="bfloat16"). A pair (vocab_size, hidden_size) makes a head without weights, to be filled by
                `Head.load` or `Head.restore`. Then `dtype` is required, and `bias=True` asks for a bias.
            bias: (vocab_size,), or None.
            trainable: whether gradients are accumulated; a frozen head serves as teacher.
            softcap: > 0, or None.
            logit_scale: finite, not 0.
            valid_vocab_size: columns from here on never get probability (padded vocabularies). None: all are valid.
            optimizer: `headwater.AdamW()`, `headwater.SGD()`, or None if only gradients are wanted.
            dtype: storage type. None: that of `weight`. float32 weights for a 16-bit head are kept whole in the master weights.
            staging_slots: explicit micro-batches that may wait for their decision at once, over all trainers. None: 1.
            initial_step: number of the first open step.
            parallelism: how a group of ranks shares the head's work; to a server that is alone both are the same. "vocabulary":
                each holds a shard, and all compute each micro-batch. "rows": each holds all weights, and a micro-batch is computed
                by one of them, several at once by several. docs/groups.md says which to take when.
            int8_teacher: for a frozen 16-bit head on a Hopper GPU: its logits as a teacher come from int8 products, which are
                faster. `teacher_logit_error` of a result is their expected error (docs/math.md, "int8 teachers").
            if_exists: the effect of a head of that name. "fail": an error. "attach": the head is returned as it is, if its
                specification is the same (`initial_step` does not matter), and `weight` is not uploaded. If its creator is still
                uploading the weights, this call waits for them. All ranks, and a restarted trainer, can therefore make the same
                call. A frozen head is refused if its weights are not the given ones. A head at its first step whose optimizer is
                the server's is refused for the same reason. A head that has trained since warns with `headwater.HeadWarning` at its
                first loss. No warning comes if `expected_step`, `TrainingLoop.resume`, `headwater.train` or `Head.restore` has said
                by then where the run continues. "replace": the head is deleted, whatever its open step holds, and created again
                with the given weights at `initial_step`. Only if its specification is the same. Its checkpoints stay. One process
                of a run makes this call.
            expected_step: the open step that the head must stand at: the step that the trainer continues from. None: any.
        Returns:
            The head, ready for use; `Head.created` says whether this call made it.
        Raises:
            InvalidArgumentError: shape, dtype or range; checked before anything is sent. A trainable head of a weight that is a
                torch.nn.Embedding's too: `headwater.torch.attach(..., tied=...)` trains such a weight.
            AlreadyExistsError: there is a head of that name; `HEAD_SPEC_MISMATCH`: and "attach" finds another specification, or
                other weights (`field`: weight or bias).
            StepMismatchError: the head is not at `expected_step`; `.checkpoints` are the steps that `Head.restore` can go to.
            ResourceExhaustedError: it does not fit; the message has the memory plan.
        """
        timeout_s = self._timeout(timeout_s)
        name = full_name(name, self._tenant)
        check_choice(if_exists, "if_exists", ("fail", "attach", "replace"))
        weight_array = bias_array = None
        if isinstance(weight, tuple):
            if len(weight) != 2 or dtype is None or not (bias is None or isinstance(bias, bool)):
                raise invalid_argument(
                    "INVALID_FIELD", "weight=(vocab_size, hidden_size) needs dtype=, and bias=True or None", field="weight"
                )
            vocab_size, hidden_size = weight
            data_type = _arrays.data_type_name(dtype)
            has_bias = bias is True
        else:
            bits_of = None if dtype is None else _arrays.data_type_name(dtype)
            weight_array = _arrays.from_any(weight, "weight", bits_of=bits_of)
            if weight_array.data.ndim != 2:
                raise wrong_shape("weight", "(vocab_size, hidden_size)", weight_array.shape)
            vocab_size, hidden_size = weight_array.shape
            data_type = bits_of or weight_array.data_type
            has_bias = bias is not None
            _arrays.check_fits(weight_array, data_type, "weight")
            if bias is not None:
                bias_array = _arrays.from_any(bias, "bias", bits_of=bits_of)
                _arrays.check_shape(bias_array.shape, (vocab_size,), "bias")
                _arrays.check_fits(bias_array, data_type, "bias")
        spec = HeadSpec(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            data_type=data_type,
            has_bias=has_bias,
            logit_scale=logit_scale,
            softcap=softcap,
            valid_vocab_size=valid_vocab_size,
            trainable=check_bool(trainable, "trainable"),
            optimizer=optimizer,
            staging_slots=staging_slots,
            initial_step=initial_step,
            parallelism=parallelism,
            int8_teacher=check_bool(int8_teacher, "int8_teacher"),
        )
        _check_expected_step(expected_step, spec, if_exists)
        if trainable:
            _check_no_embedding(weight)
        info, created = self._create(name, spec, if_exists != "fail", timeout_s)
        if if_exists == "replace" and not created:
            # Not `set_weight`, which leaves the number of the open step: a run with other weights begins at its first one.
            self._backend.call("DeleteHead", timeout_s, name=name, epoch=info.epoch, force=True)
            info, created = self._create(name, spec, False, timeout_s)
        self._backend.unconfirmed.pop(name, None)
        if not created and weight_array is not None:
            info = self._await_weights(info, timeout_s)
        head = Head(self._backend, info, created=created)
        try:
            head._check_step(expected_step, timeout_s)
            if created and weight_array is not None:
                head._upload("weight", weight_array, uuid.uuid4().hex, None, timeout_s)
                if bias_array is not None:
                    head._upload("bias", bias_array, uuid.uuid4().hex, None, timeout_s)
        except BaseException:
            if created:
                # A head without weights is of no use to the caller, who does not get a handle to it.
                with contextlib.suppress(HeadwaterError):
                    self._backend.call("DeleteHead", timeout_s, name=name, force=True)
            raise
        if not created and weight_array is not None:
            self._compare_weights(head, info, {"weight": weight_array, "bias": bias_array}, expected_step, timeout_s)
        return head

    def _create(self, name: str, spec: HeadSpec, attach: bool, timeout_s: float) -> tuple[HeadInfo, bool]:
        """A head of this specification, and whether it is new."""
        if_exists = _wire.IF_EXISTS_ATTACH_IF_SAME_SPEC if attach else _wire.IF_EXISTS_FAIL
        reply = self._backend.call("CreateHead", timeout_s, name=name, spec=head_spec_message(spec), if_exists=if_exists)
        return head_info(reply.head), reply.created

    def _compare_weights(
        self,
        head: Head,
        info: HeadInfo,
        given: dict[str, _arrays.HostArray | None],
        expected_step: int | None,
        timeout_s: float,
    ) -> None:
        """Refuses an attached head with other weights than the caller's, or notes that it keeps its own.

        Weights are compared as they are stored, by a download, which costs as much as the upload would have. A head that the
        server's optimizer has moved has other weights in any case.
        """
        spec = info.spec
        has_moved = spec.optimizer is not None and info.open_step != spec.initial_step
        if not has_moved:
            if info.state != "READY":
                return  # it hands no weights out: it has lost them, or a restarted server has brought it back
            different = (
                tensor
                for tensor, array in given.items()
                if array is not None and not _arrays.is_stored_as(array, self._stored(info, tensor, timeout_s), spec.data_type)
            )
            field = next(different, None)
            if field is None:
                return
            if spec.optimizer is not None or not spec.trainable:
                raise make_error(
                    "ALREADY_EXISTS",
                    "HEAD_SPEC_MISMATCH",
                    f"{info.name} exists, and its {field} is not the one given, which attaching would ignore; pass "
                    'if_exists="replace" to replace the head, or take another name',
                    {"head": info.name, "field": field},
                )
        if expected_step is None:
            self._backend.unconfirmed[info.name] = (
                f"{info.name} existed: it stands at step {info.open_step} and keeps its own weights, not those given to "
                f"create_head or attach. Pass expected_step={info.open_step} if this run continues from there, restore a "
                'checkpoint (Head.restore) to go back, or pass if_exists="replace" to begin with the weights given'
            )

    def _stored(self, info: HeadInfo, tensor: str, timeout_s: float) -> Any:
        # At any epoch: another rank of the run may take the head meanwhile.
        return self._backend.download(info.name, b"", tensor, info.spec, info.spec.data_type, timeout_s)

    def _await_weights(self, info: HeadInfo, timeout_s: float) -> HeadInfo:
        """Waits for the client that created the head to upload its weights."""
        deadline = time.monotonic() + timeout_s
        while info.state == "LOADING":
            if time.monotonic() >= deadline:
                raise make_error(
                    "DEADLINE_EXCEEDED",
                    "DEADLINE_EXCEEDED",
                    f"{info.name} was created by another client, whose weights did not come within {timeout_s:g} s; if that client "
                    "is gone, fill the head with Client.head(...).set_weight, or delete it",
                    {"head": info.name},
                )
            time.sleep(_WEIGHTS_POLL_S)
            info = head_info(self._backend.call("GetHead", timeout_s, name=info.name))
        return info

    def head(self, name: str, *, expected_step: int | None = None, timeout_s: float | None = None) -> Head:
        """The head of that name, at its present epoch and step.

        Args:
            expected_step: the open step that it must stand at. None: any.
        Raises:
            NotFoundError: there is none.
            StepMismatchError: it is at another step; `.checkpoints` are the steps that `Head.restore` can go to.
        """
        timeout_s = self._timeout(timeout_s)
        head = Head(self._backend, head_info(self._backend.call("GetHead", timeout_s, name=full_name(name, self._tenant))))
        head._check_step(expected_step, timeout_s)
        return head

    def heads(self, *, timeout_s: float | None = None) -> list[HeadInfo]:
        """All heads of the tenant, by name."""
        pages = self._backend.pages("ListHeads", self._timeout(timeout_s), parent=f"tenants/{self._tenant}")
        return [head_info(head) for page in pages for head in page.heads]

    def server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """Version, devices, limits and features."""
        return self._backend.server_info(self._timeout(timeout_s))

    def health(self, *, timeout_s: float | None = None) -> str:
        """`SERVING` or `NOT_SERVING`."""
        return self._backend.health(self._timeout(timeout_s))

    def teacher(self, join_key: str, *, total_rows: int, tenant: str | None = None, owned: bool = False) -> Teacher:
        """The set of teacher rows that micro-batches with `teacher_hidden=headwater.JOIN` and this key wait for. Makes no call.

        Args:
            join_key: 1 to 256 bytes; one for each micro-batch, or for several that share a set.
            total_rows: rows of the set, >= 1; the trainers name the same number.
            tenant: that of the teacher's head. None: the client's.
            owned: rows that are not used yet go away with this client's session, and so with this process. False: they stay until
                they are used, or until no micro-batch has asked for them for the server's max_join_wait.
        """
        tenant = self._tenant if tenant is None else check_tenant(tenant)
        return Teacher(self._backend, join_key, total_rows=total_rows, tenant=tenant, owned=owned)

    def transports(self, *, timeout_s: float | None = None) -> dict[str, str | None]:
        """The transports between tensors and the server, by name: None if it is available, else one sentence why not.

        "cuda_ipc": CUDA tensors are read and written in place. "shared_memory": rows lie in memory of both processes. "grpc": over
        up to `stripes` connections.
        """
        return self._backend.transports(self._timeout(timeout_s))

    @property
    def transport_note(self) -> str:
        """One sentence why tensors take no better path than they do; empty if there is none, or nothing was sent yet."""
        return self._backend.transport_note()

    def empty_rows(self, rows: int, hidden_size: int, dtype: Any = "float32") -> Any:
        """An array for hidden states or `grad_hidden_out`, with any content, which calls need not copy.

        It lies in memory that is shared with the server where that is possible (`transports`), else in ordinary memory. The memory
        lives as long as the array or a view of it, also after the client, and is then reused. Make one array for the trainer's
        life, or one for each call.

        Args:
            rows: >= 1.
            hidden_size: >= 1.
            dtype: float32, float16 or bfloat16; the latter as `ml_dtypes.bfloat16` if that is imported, else as `BFloat16`.
        Returns:
            A writable array (rows, hidden_size) in C order. torch.from_numpy shares its memory; headwater.torch.empty_rows gives
            the tensor.
        """
        shape = (check_integer(rows, "rows", low=1), check_integer(hidden_size, "hidden_size", low=1))
        data_type = _arrays.data_type_name(dtype)
        array = self._backend.row_memory.empty(shape, data_type, whole_block=True)
        return _arrays.to_numpy(_arrays.HostArray(array, data_type, _arrays.to_numpy))

    create_head_future = as_future(create_head)
    transports_future = as_future(transports)
    head_future = as_future(head)
    heads_future = as_future(heads)
    server_info_future = as_future(server_info)
    health_future = as_future(health)


def _check_expected_step(expected_step: int | None, spec: HeadSpec, if_exists: str) -> None:
    if expected_step is None:
        return
    check_integer(expected_step, "expected_step")
    if not spec.trainable:
        raise refused("a frozen head has no steps: leave expected_step out", "expected_step")
    if if_exists != "attach" and expected_step != spec.initial_step:
        raise refused(
            f"expected_step is {expected_step}, and a new head begins at initial_step {spec.initial_step}; pass "
            'if_exists="attach" to continue with a head that is there',
            "expected_step",
        )


def _check_no_embedding(weight: Any) -> None:
    """The weight is no input embedding's, which another optimizer would train apart from the head."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(weight, torch.nn.Parameter):
        return
    from headwater._model_files._torch_modules import embedding_of

    if embedding_of(weight) is not None:
        raise refused(
            "weight is also the weight of a torch.nn.Embedding: the head would train one copy and this process another. Use "
            'headwater.torch.attach(client, name, lm_head, model=model, tied="trainer") or tied="server"; a loop of your own that '
            "joins both gradients passes weight.detach()",
            "weight",
        )
