"""Copies a GGUF file without its tensors: shape, tokenizer and chat template, for models with random weights. The
embedding keeps its entry, whose shape tells the vocabulary, but not its numbers.

usage: tokenizer.py FROM.gguf TO.gguf
"""
import struct
import sys

STRING, ARRAY = 8, 9
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of each plain type


def skip_string(data, at):
    return at + 8 + struct.unpack_from("<Q", data, at)[0]


def skip_value(data, at, kind):
    if kind == STRING:
        return skip_string(data, at)
    if kind != ARRAY:
        return at + SIZES[kind]
    kind, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if kind in SIZES:
        return at + count * SIZES[kind]
    for _ in range(count):
        at = skip_value(data, at, kind)
    return at


def main():
    source, target = sys.argv[1:]
    with open(source, "rb") as file:
        data = file.read(64 << 20)  # the metadata comes first and is far smaller
    magic, version, tensors, count = struct.unpack_from("<4sIQQ", data)
    if magic != b"GGUF":
        raise SystemExit(f"tokenizer: {source} is no GGUF file")
    at = 24
    for _ in range(count):
        at = skip_string(data, at)
        at = skip_value(data, at + 4, struct.unpack_from("<I", data, at)[0])
    metadata, embedding = data[24:at], None
    for _ in range(tensors):
        start, name_end = at, skip_string(data, at)
        dimensions, = struct.unpack_from("<I", data, name_end)
        at = name_end + 4 + 8 * dimensions + 12  # the sizes, the type, the offset
        if data[start + 8:name_end] == b"token_embd.weight":
            embedding = data[start:at - 8] + struct.pack("<Q", 0)
    if embedding is None:
        raise SystemExit(f"tokenizer: {source} has no token_embd.weight")
    with open(target, "wb") as file:
        file.write(struct.pack("<4sIQQ", magic, version, 1, count) + metadata + embedding)


main()
