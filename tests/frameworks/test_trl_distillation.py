"""`RemoteDistillationTrainer` against TRL's stable DistillationTrainer, and against dense logits in fp64."""

import contextlib
import subprocess
import sys

import datasets
import pytest
import torch
from trl import DistillationConfig, DistillationTrainer
from trl_runs import NUMBERS, SETTINGS, TOKENS, check_equal, language_model, sentence, tokenizer, was_clipped

import headwater
from headwater.trl import HeadwaterConfig, JoinedTeacher, LocalTeacher, RemoteDistillationTrainer


def arguments(output, **settings):
    generator = torch.Generator().manual_seed(3)
    prompts = datasets.Dataset.from_list([{"prompt": sentence(generator), "teacher": "ab"[index % 2]} for index in range(32)])
    own = {"per_device_train_batch_size": 4, "max_completion_length": 6}
    config = DistillationConfig(output_dir=str(output), **{**SETTINGS, **own, **settings})
    return {"args": config, "train_dataset": prompts, "processing_class": tokenizer()}


def remote(client, output, student, teacher, head=(), **settings):
    config = HeadwaterConfig(client=client, head=f"student-{next(NUMBERS)}", **dict(head))
    return RemoteDistillationTrainer(student, teacher, config=config, **arguments(output, **settings))


def local(model):
    return LocalTeacher(model, f"teacher-{next(NUMBERS)}")


def stock_run(tmp_path, **settings):
    trainer = DistillationTrainer(language_model(0, 32), language_model(1, 48), **arguments(tmp_path / "stock", **settings))
    trainer.train()
    return trainer


@pytest.mark.parametrize(("beta", "temperature"), [(0.5, 1.0), (0.0, 2.0)])
def test_a_teacher_in_this_process_teaches_what_trl_alone_does(client, tmp_path, beta, temperature):
    settings = {"beta": beta, "temperature": temperature}
    ours = remote(client, tmp_path / "ours", language_model(0, 32), local(language_model(1, 48)), **settings)
    ours.train()
    check_equal(ours, stock_run(tmp_path, **settings))
    assert was_clipped(ours)


TEACHER = """
import sys, torch, transformers, headwater, headwater.torch.teachers
torch.set_num_threads(1)
folder, server, address, name = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(folder)
with headwater.connect(server) as client:
    ready = lambda: print("ready", flush=True)
    headwater.torch.teachers.serve_teacher(model, client, address, name=name, tokenizer_size=97, ready=ready)
"""


@contextlib.contextmanager
def teacher_process(tmp_path, server, model, name):
    """A process that serves the model, and the address where it is asked."""
    folder, address = tmp_path / name, f"unix:{tmp_path}/{name}.sock"
    model.save_pretrained(folder)
    command = [sys.executable, "-c", TEACHER, str(folder), server, address, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield address, process
        finally:
            process.kill()


def test_a_teacher_in_another_process_joins_what_it_computes(remote_client, server, tmp_path):
    """Its rows never come here; the curve is the stock trainer's. One that fails is named."""
    name = f"joined-{next(NUMBERS)}"
    with teacher_process(tmp_path, server.address, language_model(1, 48), name) as (address, process):
        ours = remote(remote_client, tmp_path / "ours", language_model(0, 32), JoinedTeacher(address))
        ours.train()
        check_equal(ours, stock_run(tmp_path))
        assert 0 < ours.evaluate(ours.train_dataset.select(range(4)))["eval_loss"] < 5
        teacher = JoinedTeacher(address)
        head = teacher.head(remote_client, ours.remote_head.head)
        assert (head.spec.hidden_size, head.spec.trainable) == (48, False)
        head.delete(force=True)
        again = remote(remote_client, tmp_path / "again", language_model(0, 32), local(language_model(1, 48)))
        again._teachers = [teacher]
        process.kill()
        process.wait()
        with pytest.raises((EOFError, OSError)):
            again.train()


def completions(trainer, seed=5):
    """The inputs of `_compute_loss`, with an ignored token and a whole row of padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, TOKENS, (4, 9), generator=generator)
    mask = torch.ones(4, 5, dtype=torch.long)
    mask[1, 3:] = 0
    mask[3] = 0
    return {
        "prompt_ids": ids[:, :4],
        "prompt_mask": torch.ones(4, 4, dtype=torch.long),
        "completion_ids": ids[:, 4:],
        "completion_mask": mask,
        "teacher_index": torch.tensor([0, 1, 1, 0]),
    }


def dense(student, teachers, inputs, beta, temperature=1.0):
    """The divergence in fp64, over the tokenizer's tokens."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    mask = inputs["completion_mask"].bool()

    def log_probabilities(model):
        rows = model.model(input_ids=ids, attention_mask=attention).last_hidden_state[:, 3:-1]
        logits = rows.double() @ model.lm_head.weight.double().T
        return torch.log_softmax(logits[..., :TOKENS] / temperature, -1)

    logq = log_probabilities(student)
    stacked = torch.stack([log_probabilities(teacher) for teacher in teachers])
    index = inputs["teacher_index"] if len(teachers) > 1 else torch.zeros(4, dtype=torch.long)
    logp = stacked[index, torch.arange(4)]
    p, q = logp.exp(), logq.exp()
    middle = (beta * p + (1 - beta) * q).log()
    divergence = beta * (p * (logp - middle)).sum(-1) + (1 - beta) * (q * (logq - middle)).sum(-1)
    return divergence[mask].mean(), -(q * logq).sum(-1)[mask].sum(), int(mask.sum())


def one_loss(trainer, inputs):
    loss, entropy, count = trainer._compute_loss(trainer.model, inputs, None)
    loss.backward()
    return loss, entropy, count


def test_rows_are_routed_to_their_teachers(client, tmp_path):
    student, teachers = language_model(0, 32), [language_model(1, 48), language_model(2, 16)]
    reference = language_model(0, 32)
    trainer = remote(client, tmp_path, student, {"a": local(teachers[0]), "b": local(teachers[1])}, beta=0.3)
    inputs = completions(trainer)
    loss, entropy, count = one_loss(trainer, inputs)
    expected = dense(reference, teachers, inputs, 0.3)
    assert (loss.item(), entropy.item(), count.item()) == pytest.approx([float(value) for value in expected], rel=1e-5)
    expected[0].backward()
    gradient = reference.model.layers[0].mlp.up_proj.weight.grad
    assert torch.allclose(
        student.model.layers[0].mlp.up_proj.weight.grad, gradient, rtol=1e-4, atol=1e-4 * float(gradient.abs().max())
    )
    # A teacher without a row in a micro-batch is asked for nothing, and the id that it would have is drawn.
    inputs["teacher_index"] = torch.zeros(4, dtype=torch.long)
    loss, *_ = one_loss(trainer, inputs)
    assert loss.item() == pytest.approx(float(dense(reference, teachers, inputs, 0.3)[0]), rel=1e-5)
    head = trainer.remote_head.head
    assert head.seal(expected_micro_batches=4).totals.micro_batch_count == 4


def test_the_column_of_the_dataset_names_the_teacher(client, tmp_path):
    trainer = remote(
        client, tmp_path, language_model(0, 32), {"a": local(language_model(1, 48)), "b": local(language_model(2, 16))}, max_steps=1
    )
    seen = []
    generate = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: seen.append((inputs, generate(inputs))) or seen[-1][1]
    trainer.train()
    inputs, output = seen[0]
    assert output["teacher_index"].tolist() == ["ab".index(row["teacher"]) for row in inputs]
    with pytest.raises(headwater.InvalidArgumentError, match="teacher='c'; teachers are a, b"):
        trainer._index_of({"teacher": "c"})


def test_padded_vocabularies_are_compared_by_the_tokenizers_size(client, tmp_path):
    student, teacher, reference = language_model(0, 32, 104), language_model(1, 48, 112), language_model(0, 32, 104)
    trainer = remote(client, tmp_path, student, teacher, beta=0.5, temperature=2.0)
    inputs = completions(trainer)
    loss, entropy, _ = one_loss(trainer, inputs)
    expected = dense(reference, [teacher], inputs, 0.5, 2.0)
    assert (loss.item(), entropy.item()) == pytest.approx([float(value) for value in expected[:2]], rel=1e-5)
    assert trainer.remote_head.head.spec.valid_vocab_size == TOKENS


def test_what_cannot_teach_is_refused_before_training(client, tmp_path):
    student, teacher = language_model(0, 32), language_model(1, 48)
    with pytest.raises(headwater.InvalidArgumentError, match="teacher_model is TRL's own"):
        RemoteDistillationTrainer(student, local(teacher), teacher_model=teacher, **arguments(tmp_path))
    args = arguments(tmp_path, teacher_model_name_or_path="elsewhere")
    with pytest.raises(headwater.InvalidArgumentError, match="teacher_model_name_or_path is TRL's own"):
        RemoteDistillationTrainer(student, local(teacher), **args)
    with pytest.raises(headwater.InvalidArgumentError, match="one teacher or more"):
        remote(client, tmp_path, student, {})

    class Narrow:
        def head(self, client, student):
            return client.create_head("narrow", (96, 8), dtype="float32", trainable=False, if_exists="replace")

    with pytest.raises(headwater.InvalidArgumentError, match=r"narrow has 96 valid columns.*tokenizer has 97 tokens"):
        remote(client, tmp_path, student, Narrow())
    with pytest.raises(headwater.InvalidArgumentError, match="authkey"):
        JoinedTeacher("gpu7:1234")
    with pytest.raises(headwater.InvalidArgumentError, match="unix:/path"):
        JoinedTeacher("gpu7")
