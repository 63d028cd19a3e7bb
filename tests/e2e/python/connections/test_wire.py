"""The package's messages have a descriptor pool of their own: a program's stubs, of the same proto or a newer one, do not collide.

Each case is a process of its own, because protobuf's default pool forgets nothing.
"""

import pytest
from expectations import run_python

# Registers what generated stubs register, in the default pool: the package's files under another path, with changes.
STUBS = """
import sys
from pathlib import Path
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

def load_stubs(newer):
    folder = next(Path(path) / "headwater" for path in sys.path if (Path(path) / "headwater" / "messages.binpb").exists())
    files = descriptor_pb2.FileDescriptorSet.FromString((folder / "messages.binpb").read_bytes()).file
    own = {file.name for file in files if file.package == "headwater.v1"}
    pool = descriptor_pool.Default()
    for file in files:
        if file.name not in own:
            __import__(file.name.removesuffix(".proto").replace("/", ".") + "_pb2")
            continue
        file.name = "vendored/" + file.name
        file.dependency[:] = ["vendored/" + name if name in own else name for name in file.dependency]
        for message in file.message_type:
            if newer and message.name == "HeadSpec":
                message.field.add(name="more", number=1000, type=5, label=1, json_name="more")
                next(field for field in message.field if field.name == "vocab_size").name = "rows"
        pool.AddSerializedFile(file.SerializeToString())
    descriptor = pool.FindMessageTypeByName("headwater.v1.HeadSpec")
    if hasattr(message_factory, "GetMessageClass"):
        return message_factory.GetMessageClass(descriptor)
    return message_factory.MessageFactory(pool).GetPrototype(descriptor)

def use_stubs(spec, newer):
    made = spec(hidden_size=4, **({"rows": 3, "more": 5} if newer else {"vocab_size": 3}))
    assert spec.FromString(made.SerializeToString()) == made
    return made.SerializeToString()

def use_package():
    import headwater
    from headwater import _messages, _wire
    message = _messages.head_spec_message(headwater.HeadSpec(3, 4, optimizer=headwater.AdamW()))
    assert _messages.head_spec(_wire.HeadSpec.FromString(message.SerializeToString())).optimizer == headwater.AdamW()
    assert _wire.value_name("HeadState", _wire.HEAD_STATE_READY) == "READY" and _wire.value_name("HeadState", 99) == "UNKNOWN_99"
    return _wire.HeadSpec
"""


IMPORTED = {
    "before": "message = use_stubs(load_stubs(newer), newer)\nassert use_package().FromString(message).hidden_size == 4\n",
    "after": "own = use_package()\nassert own.FromString(use_stubs(load_stubs(newer), newer)).hidden_size == 4\nuse_package()\n",
}


@pytest.mark.parametrize("newer", (False, True))
@pytest.mark.parametrize("when", IMPORTED)
def test_stubs_do_not_collide_with_the_package(when, newer):
    run_python(STUBS + f"newer = {newer}\n" + IMPORTED[when])


def test_the_packages_own_stubs_and_grpcio_are_loaded_on_request_alone():
    run_python(
        STUBS + "use_package()\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] in ('grpc', 'torch') or name == 'headwater.v1']\n"
        "from headwater.v1 import head_service_pb2\n"
        "assert use_stubs(head_service_pb2.HeadSpec, False)\n"
        "use_package()\n"
    )


def test_the_package_works_where_grpcio_is_not_installed():
    run_python(STUBS + "sys.modules['grpc'] = None\nuse_package()\nimport headwater.local, headwater.v1.loss_pb2\n")
