"""The descriptors of the wire API: today's, those that were kept of releases, and what of the old has been broken.

python wire_descriptors.py >wire/VERSION.binpb.gz  # at each release; PYTHONPATH has the package

A kept file is a compressed FileDescriptorSet, as protoc writes it.
"""

import gzip
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, duration_pb2, message_factory, timestamp_pb2
from headwater.v1 import error_pb2, head_service_pb2, loss_pb2, loss_service_pb2, session_service_pb2, tensor_pb2

# In an order in which each file comes after those that it imports. Not that of groups: their processes are of one build.
MODULES = (tensor_pb2, loss_pb2, error_pb2, loss_service_pb2, head_service_pb2, session_service_pb2)
KEPT = Path(__file__).with_name("wire")
Field = descriptor_pb2.FieldDescriptorProto


def today() -> descriptor_pb2.FileDescriptorSet:
    """Of this build."""
    files = descriptor_pb2.FileDescriptorSet()
    for module in MODULES:
        module.DESCRIPTOR.CopyToProto(files.file.add())
    return files


def kept(path: Path) -> descriptor_pb2.FileDescriptorSet:
    """Of a release."""
    return descriptor_pb2.FileDescriptorSet.FromString(gzip.decompress(path.read_bytes()))


def messages(files: descriptor_pb2.FileDescriptorSet) -> dict[str, descriptor_pb2.DescriptorProto]:
    """All messages by name, those inside of others included."""

    def walk(prefix: str, message: descriptor_pb2.DescriptorProto) -> Iterator[tuple[str, descriptor_pb2.DescriptorProto]]:
        name = f"{prefix}.{message.name}"
        yield name, message
        for inner in message.nested_type:
            yield from walk(name, inner)

    return {name: found for file in files.file for message in file.message_type for name, found in walk(file.package, message)}


def methods(files: descriptor_pb2.FileDescriptorSet) -> dict[str, tuple]:
    """All methods by the path that they are called by: their messages, and whether each is a stream."""
    return {
        f"/{file.package}.{service.name}/{method.name}": (
            method.input_type,
            method.output_type,
            method.client_streaming,
            method.server_streaming,
        )
        for file in files.file
        for service in file.service
        for method in service.method
    }


def shape(message: descriptor_pb2.DescriptorProto, field: Field) -> tuple:
    """All of a field that the wire, or the code of a client, depends on."""
    group = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") and not field.proto3_optional else ""
    return field.number, field.type, field.label, field.type_name, field.proto3_optional, group


def facts(files: descriptor_pb2.FileDescriptorSet) -> dict[str, Any]:
    """All messages, fields, values of enums and methods by name, with what they are."""
    found: dict[str, Any] = {f"method {path}": signature for path, signature in methods(files).items()}
    enums = {f"{file.package}.{enum.name}": enum for file in files.file for enum in file.enum_type}
    for name, message in messages(files).items():
        found[f"message {name}"] = "there"
        found |= {f"field {name}.{field.name}": shape(message, field) for field in message.field}
        enums |= {f"{name}.{enum.name}": enum for enum in message.enum_type}
    return found | {f"value {name}.{value.name}": value.number for name, enum in enums.items() for value in enum.value}


def broken(old: descriptor_pb2.FileDescriptorSet, new: descriptor_pb2.FileDescriptorSet) -> list[str]:
    """What a client or server of `old` could no longer say, or would understand otherwise, with one of `new`."""
    now = facts(new)
    return [f"{name} was {fact}, is {now.get(name)}" for name, fact in facts(old).items() if now.get(name) != fact]


class Messages:
    """Classes of messages, made of descriptors alone."""

    def __init__(self, files: descriptor_pb2.FileDescriptorSet):
        self._pool = descriptor_pool.DescriptorPool()
        for module in (any_pb2, duration_pb2, timestamp_pb2):
            self._pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
        for file in files.file:
            self._pool.AddSerializedFile(file.SerializeToString())

    def __getattr__(self, name: str) -> Any:
        descriptor = self._pool.FindMessageTypeByName(f"headwater.v1.{name}")
        if hasattr(message_factory, "GetMessageClass"):
            return message_factory.GetMessageClass(descriptor)
        return message_factory.MessageFactory(self._pool).GetPrototype(descriptor)


if __name__ == "__main__":
    sys.stdout.buffer.write(gzip.compress(today().SerializeToString(), mtime=0))
