#!/usr/bin/env python3
"""Writes a copy of a source with a bug in it: what shows that a fuzz target finds one.

    plant.py TARGET OUTPUT

The sources themselves are not touched. Exits non-zero if a bug no longer fits its source; then the table wants a new line.
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]

# target: file; text that occurs once; what it becomes. Above each, what the product does then.
BUGS = {
    # Takes algorithms of more words than there are.
    "algorithm_cache": (
        "kernels/cuda/products/algorithm_cache.cc",
        "value.size() != words->size()",
        "value.size() < words->size()",
    ),
    # Reads beyond the message for an unknown field of fixed size at its end.
    "chunk_request": (
        "proto/headwater/v1/row_chunk_wire.cc",
        "    if (length > left_) return false;\n    Skip(length);",
        "    Skip(length);",
    ),
    # Drops what follows a summary.
    "chunk_response": (
        "proto/headwater/v1/row_chunk_wire.cc",
        "cursor.ReadLength(&length) && length == cursor.left()",
        "cursor.ReadLength(&length) && length <= cursor.left()",
    ),
    # Takes two descriptors for one.
    "descriptor_message": (
        "server/transport/descriptor_socket.cc",
        "if (packet.descriptors.size() != 1) {",
        "if (packet.descriptors.empty()) {",
    ),
    # Forgets the row's number where rows come in chunks.
    "digest": ("kernels/core/digest.cc", "static_cast<uint64_t>(row_start + row)", "static_cast<uint64_t>(0 * row_start + row)"),
    # Takes a shard without rows.
    "manifest": ("server/checkpoint/manifest.cc", "file.rows.vocab_end <= next_row", "file.rows.vocab_end < next_row"),
    # Takes a name of 65 characters.
    "names": ("server/heads/head_name.cc", "id.size() > kMaxIdLength", "id.size() > kMaxIdLength + 1"),
    # Takes a term that ends after the micro-batch.
    "request": (
        "server/service/request/loss_request.cc",
        "micro_batch_rows == 0 ? 0 : 1, rows_left)",
        "micro_batch_rows == 0 ? 0 : 1, micro_batch_rows)",
    ),
    # Keeps what a client that went away had begun to upload, when the head is gone.
    "rpc_sequence": (
        "server/service/head/upload_store.cc",
        "{ return upload->head.expired(); }",
        "{ return upload->head.expired() && upload->busy; }",
    ),
    # Takes tensors that overlap.
    "safetensors": ("server/model_files/safetensors.cc", "if (begin != next) return", "if (begin > next) return"),
    # Lets the last of two values of a key win.
    "strict_json": (
        "server/model_files/strict_json.cc",
        'return keys_.back().insert(name).second || Refuse("has a repeated key");',
        "return keys_.back().insert(name).second || true;",
    ),
    # Takes a pattern's stars at its end for one.
    "token_file": (
        "server/service/access/token_file.cc",
        "while (p < pattern.size() && pattern[p] == '*') ++p;",
        "if (p < pattern.size() && pattern[p] == '*') ++p;",
    ),
    # Reads one element beyond a tensor.
    "weights_reader": (
        "server/checkpoint/weights_reader.cc",
        "element_start > whole - element_count) {",
        "element_start > whole) {",
    ),
}


def main() -> int:
    target, output = sys.argv[1], pathlib.Path(sys.argv[2])
    file, right, wrong = BUGS[target]
    text = (ROOT / file).read_text(encoding="utf-8")
    if text.count(right) != 1:
        print(f"plant.py: {target}: {file} has the text {text.count(right)} times, not once: {right}", file=sys.stderr)
        return 1
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text.replace(right, wrong), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
