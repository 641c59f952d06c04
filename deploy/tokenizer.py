"""Copies a GGUF file without its tensors: shape, tokenizer and chat template, for models with random weights.

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
    magic, version, _, count = struct.unpack_from("<4sIQQ", data)
    if magic != b"GGUF":
        raise SystemExit(f"tokenizer: {source} is no GGUF file")
    at = 24
    for _ in range(count):
        at = skip_string(data, at)
        at = skip_value(data, at + 4, struct.unpack_from("<I", data, at)[0])
    with open(target, "wb") as file:
        file.write(struct.pack("<4sIQQ", magic, version, 0, count) + data[24:at])


main()
