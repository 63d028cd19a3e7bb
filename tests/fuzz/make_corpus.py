#!/usr/bin/env python3
"""Writes the corpora of the targets whose inputs are not text; the others are written by hand.

make_corpus.py            into corpus/ beside this file
"""

import pathlib
import struct

CORPUS = pathlib.Path(__file__).resolve().parent / "corpus"


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def data(field: int, value: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(value)) + value


def chunk(role: int = 1, term: int = 0, start: int = 0, count: int = 2, rows: bytes = b"12345678") -> bytes:
    return number(1, role) + number(2, term) + number(3, start) + number(4, count) + data(15, rows)


UNKNOWN = number(77, 5) + data(78, b"text") + b"\xf9\x04" + b"12345678" + b"\xfd\x04" + b"1234"
GROUP = b"\x2b" + number(1, 2) + b"\x2c"


def messages(field: int) -> dict[str, bytes]:
    """What a message with a chunk in `field` may look like."""
    plain = chunk()
    return {
        "plain": data(field, plain),
        "no_rows": data(field, chunk(rows=b"")),
        "empty_chunk": data(field, b""),
        "negative_numbers": data(field, chunk(role=-1, term=-1, start=-1, count=-1)),
        "largest_numbers": data(field, chunk(role=1 << 31, term=1 << 40, start=(1 << 63) - 1, count=1 << 63)),
        "rows_first": data(field, data(15, b"rows") + number(4, 1)),
        "last_value_counts": data(field, plain + number(4, 7) + data(15, b"other")),
        "two_chunks_merge": data(field, plain) + data(field, number(3, 9) + data(15, b"z")),
        "unknown_fields": UNKNOWN + data(field, UNKNOWN + plain + UNKNOWN) + UNKNOWN,
        "group_inside": data(field, plain + GROUP),
        "group_outside": data(field, plain) + GROUP,
        "groups_as_deep_as_protobuf_reads": data(field, b"\x2b" * 98 + b"\x2c" * 98 + plain),
        "groups_deeper_than_protobuf_reads": data(field, b"\x2b" * 100 + b"\x2c" * 100 + plain),
        "group_of_another_number_ends": data(field, plain) + b"\x2b\x34",
        "length_beyond_the_end": varint(field << 3 | 2) + b"\x7f" + plain,
        "length_of_64_bits": varint(field << 3 | 2) + b"\xff" * 9 + b"\x01" + plain,
        "length_in_five_bytes": varint(field << 3 | 2) + b"\x8b\x80\x80\x80\x00" + data(15, b"123456789"),
        "tag_in_five_bytes": b"\x92\x80\x80\x80\x00" + varint(len(plain)) + plain,
        "number_in_ten_bytes": data(field, b"\x20" + b"\x82" + b"\x80" * 8 + b"\x00"),
        "number_in_eleven_bytes": data(field, b"\x20" + b"\x82" + b"\x80" * 9 + b"\x00"),
        "rows_end_after_the_chunk": data(field, b"\x7a\x09" + b"12345678") + b"9",
        "number_of_another_type": data(field, data(1, b"text") + number(15, 3) + plain),
        "chunk_of_another_type": number(field, 5) + data(field, plain),
        "field_number_0": data(field, plain) + b"\x00\x01",
        "wire_type_7": data(field, plain) + b"\x1f",
        "cut_fixed64": data(field, plain) + b"\xf9\x04" + b"1234",
        "nothing": b"",
    }


def write(target: str, name: str, content: bytes) -> None:
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.input").write_bytes(content)


def main() -> None:
    for name, message in messages(2).items():
        write("chunk_request", name, b"\x00" + message)
    write("chunk_request", "plain_in_a_slice_for_each_byte", b"\x01" + data(2, chunk()))
    write("chunk_request", "unknown_fields_in_slices", b"\x07" + messages(2)["unknown_fields"])
    write("chunk_request", "a_header", b"\x00" + data(1, number(5, 3)))
    write("chunk_request", "a_header_then_a_chunk", b"\x00" + data(1, number(5, 3)) + data(2, chunk()))
    write("chunk_request", "a_chunk_then_a_header", b"\x00" + data(2, chunk()) + data(1, number(5, 3)))
    for name, message in messages(1).items():
        write("chunk_response", name, b"\x00" + message)
    summary = data(1, data(1, b"\x09" + struct.pack("<d", 1.5))) + number(2, 3) + data(6, b"d" * 16)
    write("chunk_response", "plain_in_a_slice_for_each_byte", b"\x01" + data(1, chunk(role=3)))
    write("chunk_response", "a_summary", b"\x00" + data(2, summary))
    write("chunk_response", "a_summary_in_slices", b"\x05" + data(2, summary))
    write("chunk_response", "a_summary_then_a_chunk", b"\x00" + data(2, summary) + data(1, chunk(role=3)))
    write("chunk_response", "a_chunk_then_a_summary", b"\x00" + data(1, chunk(role=3)) + data(2, summary))
    write("chunk_response", "a_summary_that_is_none", b"\x00" + data(2, b"\xff\xff"))

    right = b"HWMD" + struct.pack("<Iq", 1, 4096)
    for name, what, packet in [
        ("right", 1, right),
        ("no_descriptor", 0, right),
        ("two_descriptors", 2, right),
        ("three_descriptors", 3, right),
        ("memory_that_is_not_sealed", 1 + 4, right),
        ("a_descriptor_of_no_memory", 1 + 8, right),
        ("another_magic", 1, b"HWMX" + right[4:]),
        ("another_version", 1, b"HWMD" + struct.pack("<Iq", 2, 4096)),
        ("another_size", 1, b"HWMD" + struct.pack("<Iq", 1, 8192)),
        ("a_negative_size", 1, b"HWMD" + struct.pack("<Iq", 1, -1)),
        ("too_short", 1, right[:15]),
        ("too_long", 1, right + b"x"),
        ("nothing", 1, b""),
    ]:
        write("descriptor_message", name, bytes([what]) + packet)

    for name, shape, header, rows in [
        ("rows_of_one_byte", (0, 0, 1, 0), b"header", bytes(range(40))),
        ("rows_of_two_pairs_and_a_rest", (36, 0, 2, 1), b"", bytes(range(37)) * 7),
        ("rows_of_more_than_a_block", (80, 1, 1, 2), b"h" * 40, bytes(index % 251 for index in range(3 * 5121))),
        ("a_header_of_more_than_a_block", (3, 0, 0, 0), b"h" * 4100, b"12345678"),
        ("no_rows", (255, 1, 3, 0), b"header", b"few"),
    ]:
        write("digest", name, bytes(shape) + header + b"\x01" + rows)


if __name__ == "__main__":
    main()
