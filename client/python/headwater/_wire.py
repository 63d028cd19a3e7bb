"""The messages of proto/headwater/v1, in a descriptor pool of their own: stubs that the program has of them do not collide.

`_wire.HeadSpec` is a message class, and `_wire.DATA_TYPE_FLOAT32` the number of an enum's value.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "headwater.v1"
# The last message of an RPC that answers several.
_RESULTS = {"UploadWeights": "Head", "ComputeLoss": "MicroBatchSummary"}


def _read_files() -> Any:
    """The FileDescriptorSet that the build has put beside this module, with its imports."""
    return descriptor_pb2.FileDescriptorSet.FromString(Path(__file__).with_name("messages.binpb").read_bytes())


_files = _read_files().file
_pool = descriptor_pool.DescriptorPool()
for _file in _files:
    _pool.AddSerializedFile(_file.SerializeToString())
_enums = {
    enum.name: _pool.FindEnumTypeByName(f"{_PACKAGE}.{enum.name}")
    for file in _files
    if file.package == _PACKAGE
    for enum in file.enum_type
}
_methods = {
    method.name: (f"/{file.package}.{service.name}/{method.name}".encode(), method)
    for file in _files
    if file.package == _PACKAGE
    for service in file.service
    for method in service.method
}
_values = {value.name: value.number for enum in _enums.values() for value in enum.values}
# Protobuf 4.22 has a function instead of the factory, and 5 no factory any more.
_factory = None if hasattr(message_factory, "GetMessageClass") else message_factory.MessageFactory(_pool)


def __getattr__(name: str) -> Any:
    if name in _values:
        found = _values[name]
    else:
        try:
            descriptor = _pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")
        except KeyError:
            raise AttributeError(f"there is no message or enum value {name} in {_PACKAGE}") from None
        found = message_factory.GetMessageClass(descriptor) if _factory is None else _factory.GetPrototype(descriptor)
    globals()[name] = found  # looked up without this function from now on
    return found


@functools.cache
def rpc(name: str) -> tuple[bytes, Any, Any]:
    """An RPC's path, and the classes of its request (the header, where rows follow) and of its answer."""
    path, method = _methods[name]
    request = _pool.FindMessageTypeByName(method.input_type.lstrip("."))
    if method.client_streaming:
        request = request.fields_by_name["header"].message_type
    answer = _RESULTS.get(name) or method.output_type.rpartition(".")[2]
    return path, __getattr__(request.name), __getattr__(answer)


@functools.cache
def value_name(enum: str, number: int) -> str:
    """`STAGED` for CONTRIBUTION_STATE_STAGED of `ContributionState`; `UNKNOWN_7` for a value that this build does not know."""
    value = _enums[enum].values_by_number.get(number)
    if value is None:
        return f"UNKNOWN_{number}"
    prefix = "".join(f"_{letter}" if letter.isupper() else letter for letter in enum).lstrip("_").upper() + "_"
    name: str = value.name.removeprefix(prefix)
    return name
