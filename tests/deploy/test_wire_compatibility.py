"""Clients of releases work with today's server: the wire API has lost nothing, and a release's messages train a head."""

import copy

import grpc
import numpy as np
import pytest
import wire_descriptors
from servers import running_server

RELEASES = sorted(wire_descriptors.KEPT.glob("*.binpb.gz"))
CALL_TIMEOUT_S = 60
ROWS, HIDDEN_SIZE, VOCAB_SIZE, LEARNING_RATE = 12, 8, 40, 0.25
FLOAT32, INT32 = 1, 4
WEIGHT, HIDDEN, FORWARD_BACKWARD, EAGER, EXPLICIT = 1, 1, 1, 1, 2
FACTOR = 0.5  # of the second micro-batch, which is staged and then committed


def release_name(path):
    return path.name.removesuffix(".binpb.gz")


def test_releases_are_kept():
    assert RELEASES


@pytest.mark.parametrize("path", RELEASES, ids=release_name)
def test_nothing_of_a_release_is_missing_or_changed(path):
    assert wire_descriptors.broken(wire_descriptors.kept(path), wire_descriptors.today()) == []


def field(message, index):
    return lambda files: wire_descriptors.messages(files)[f"headwater.v1.{message}"].field[index]


def services(files):
    return next(file for file in files.file if file.service).service


def commit_mode(files):
    return next(enum for file in files.file for enum in file.enum_type if enum.name == "CommitMode")


def optional_field(files):
    return next(found for found in wire_descriptors.messages(files)["headwater.v1.HeadStep"].field if found.proto3_optional)


@pytest.mark.parametrize(
    "find, attribute, value",
    [
        (field("HeadSpec", 1), "number", 1002),
        (field("RowChunk", 2), "type", wire_descriptors.Field.TYPE_INT32),
        (field("RowChunk", 2), "name", "first_row"),
        (field("Tensor", 2), "label", wire_descriptors.Field.LABEL_REPEATED),
        (lambda files: commit_mode(files).value[-1], "number", 77),
        (lambda files: services(files)[0].method[0], "client_streaming", False),
        (optional_field, "proto3_optional", False),
        # Without an attribute: the last one is dropped.
        (lambda files: files.file[1].message_type, None, None),
        (lambda files: files.file[0].enum_type[0].value, None, None),
        (lambda files: services(files)[0].method, None, None),
        (services, None, None),
    ],
)
def test_what_breaks_clients_is_seen_and_additions_are_not(find, attribute, value):
    old = wire_descriptors.today()
    new = copy.deepcopy(old)
    if attribute is None:
        find(new).pop()
    else:
        setattr(find(new), attribute, value)
    assert wire_descriptors.broken(old, new) != []
    added = copy.deepcopy(old)
    wire_descriptors.messages(added)["headwater.v1.HeadSpec"].field.add(name="more", number=1000, type=5, label=1)
    assert wire_descriptors.broken(old, added) == []


def cross_entropy(hidden, weight, targets):
    """Loss sum, gradient of hidden and of the weight, in double precision."""
    logits = hidden.astype(np.float64) @ weight.astype(np.float64).T
    logits -= logits.max(1, keepdims=True)
    log_probabilities = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    difference = np.exp(log_probabilities)
    difference[np.arange(ROWS), targets] -= 1
    return -log_probabilities[np.arange(ROWS), targets].sum(), difference @ weight, difference.T @ hidden


def train(release, channel):
    """A session, a head, a step of two micro-batches and its end, by messages of the release alone; checks every answer."""
    kinds = wire_descriptors.Messages(release)
    methods = wire_descriptors.methods(release)

    def call(name, *requests):
        """The answers to one call, all messages by the release's descriptors."""
        request_type, answer_type, streams_in, streams_out = methods["/headwater.v1." + name]
        answer = getattr(kinds, answer_type.rsplit(".", 1)[1])
        assert {type(request).DESCRIPTOR.full_name for request in requests} == {request_type.removeprefix(".")}
        kind = f"{'stream' if streams_in else 'unary'}_{'stream' if streams_out else 'unary'}"
        method = getattr(channel, kind)("/headwater.v1." + name, lambda message: message.SerializeToString(), answer.FromString)
        result = method(iter(requests) if streams_in else requests[0], timeout=CALL_TIMEOUT_S)
        return list(result) if streams_out else [result]

    rng = np.random.default_rng(8)
    weight = rng.standard_normal((VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32)
    hidden = rng.standard_normal((ROWS, HIDDEN_SIZE)).astype(np.float32)
    targets = rng.integers(0, VOCAB_SIZE, ROWS).astype(np.int32)
    name = "tenants/default/heads/h"

    (info,) = call("SessionService/GetServerInfo", kinds.GetServerInfoRequest())
    assert info.version and info.limits.max_heads > 0 and info.devices[0].name
    (session,) = call("SessionService/OpenSession", kinds.OpenSessionRequest(client_name="of a release"))
    assert len(session.session_id) == 32

    spec = kinds.HeadSpec(vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, data_type=FLOAT32, trainable=True)
    spec.optimizer.sgd.SetInParent()
    (made,) = call("HeadService/CreateHead", kinds.CreateHeadRequest(name=name, spec=spec))
    assert made.created and made.head.spec.vocab_size == VOCAB_SIZE

    upload = kinds.UploadWeightsHeader(
        name=name, epoch=made.head.epoch, upload_id="u", tensor=WEIGHT, data_type=FLOAT32, total_bytes=weight.nbytes
    )
    chunk = kinds.ByteChunk(offset_bytes=0, data=weight.tobytes())
    answers = call("HeadService/UploadWeights", kinds.UploadWeightsRequest(header=upload), kinds.UploadWeightsRequest(chunk=chunk))
    epoch = answers[-1].head.epoch

    at = kinds.HeadStep(head=name, head_epoch=epoch, step=0)
    term = kinds.LossTerm(head=at, targets=kinds.Tensor(data_type=INT32, shape=[ROWS], data=targets.tobytes()))
    term.cross_entropy.SetInParent()
    header = kinds.MicroBatchHeader(micro_batch=0, row_count=ROWS, hidden_size=HIDDEN_SIZE, data_type=FLOAT32, terms=[term])
    header.compute_mode, header.commit_mode, header.return_grad_hidden = FORWARD_BACKWARD, EAGER, True
    header.session_id = session.session_id
    rows = kinds.RowChunk(role=HIDDEN, row_start=0, row_count=ROWS, data=hidden.tobytes())
    answers = call("LossService/ComputeLoss", kinds.ComputeLossRequest(header=header), kinds.ComputeLossRequest(chunk=rows))
    loss_sum, grad_hidden, grad_weight = cross_entropy(hidden, weight, targets)
    (sums,) = (term.sums for term in answers[-1].summary.terms)
    assert sums.loss_sum == pytest.approx(loss_sum, rel=1e-5) and sums.valid_token_count == ROWS
    computed = np.frombuffer(b"".join(answer.chunk.data for answer in answers[:-1]), np.float32).reshape(ROWS, HIDDEN_SIZE)
    np.testing.assert_allclose(computed, grad_hidden, atol=1e-5)

    header.micro_batch, header.commit_mode = 1, EXPLICIT
    call("LossService/ComputeLoss", kinds.ComputeLossRequest(header=header), kinds.ComputeLossRequest(chunk=rows))
    (kept,) = call("SessionService/KeepAlive", kinds.KeepAliveRequest(session_id=session.session_id))
    assert kept.lease.seconds > 0
    commit = kinds.CommitMicroBatchRequest(heads=[at], micro_batch=1, factor=FACTOR, session_id=session.session_id)
    (committed,) = call("LossService/CommitMicroBatch", commit)
    assert not committed.replayed
    (step,) = call("HeadService/GetStep", kinds.GetStepRequest(head=at))
    assert [entry.micro_batch for entry in step.open.micro_batches] == [0, 1]
    assert step.open.totals.valid_token_count == 2 * ROWS
    apply = kinds.ApplyOptimizerStepRequest(head=at, learning_rate=LEARNING_RATE)
    apply.expected.count = 2
    (applied,) = call("HeadService/ApplyOptimizerStep", apply)
    assert applied.open_step == 1

    answers = call("HeadService/DownloadWeights", kinds.DownloadWeightsRequest(name=name, tensor=WEIGHT, data_type=FLOAT32))
    trained = np.frombuffer(b"".join(answer.chunk.data for answer in answers[1:]), np.float32).reshape(VOCAB_SIZE, HIDDEN_SIZE)
    assert list(answers[0].header.shape) == [VOCAB_SIZE, HIDDEN_SIZE]
    np.testing.assert_allclose(trained, weight - LEARNING_RATE * (1 + FACTOR) * grad_weight, atol=1e-5)

    (page,) = call("HeadService/ListHeads", kinds.ListHeadsRequest(parent="tenants/default"))
    assert name in [head.name for head in page.heads]
    call("HeadService/DeleteHead", kinds.DeleteHeadRequest(name=name, epoch=epoch, force=True))
    call("SessionService/CloseSession", kinds.CloseSessionRequest(session_id=session.session_id))


@pytest.mark.parametrize("path", RELEASES, ids=release_name)
def test_messages_of_a_release_train_a_head_on_this_server(path):
    with running_server() as server, grpc.insecure_channel(server.address) as channel:
        train(wire_descriptors.kept(path), channel)
