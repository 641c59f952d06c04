"""Compiles kernels/cuda/*.cu with NVRTC into one folder of cubins; no GPU and no CUDA headers are needed.

usage: cubins.py NVRTC_LIBRARY SOURCE_FOLDER OUT_FOLDER

Prints one line a kernel and fails on local memory: a kernel that spills registers is far too slow to ship. Registers
and stack are read from the cubin itself (ELF section .nv.info), shared memory is chosen at launch.
"""
import ctypes
import pathlib
import struct
import sys

ARCHITECTURES = ("sm_80", "sm_89", "sm_90")
FRAME_SIZE, STACK_SIZE, REGISTERS = 0x11, 0x12, 0x2F  # attributes of .nv.info: {symbol, value}


def check(library, result):
    if result != 0:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise SystemExit(f"cubins: NVRTC: {library.nvrtcGetErrorString(result).decode()}")


def compile_source(library, source, headers, architecture):
    names = (ctypes.c_char_p * len(headers))(*(header.name.encode() for header in headers))
    texts = (ctypes.c_char_p * len(headers))(*(header.read_bytes() for header in headers))
    program = ctypes.c_void_p()
    check(library, library.nvrtcCreateProgram(
        ctypes.byref(program), source.read_bytes(), source.name.encode(), len(headers), texts, names))
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    result = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    check(library, library.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
    log = ctypes.create_string_buffer(size.value)
    check(library, library.nvrtcGetProgramLog(program, log))
    if log.value.strip():
        print(log.value.decode().strip(), file=sys.stderr)
    if result != 0:
        raise SystemExit(f"cubins: {source.name} does not compile for {architecture}")
    check(library, library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
    cubin = ctypes.create_string_buffer(size.value)
    check(library, library.nvrtcGetCUBIN(program, cubin))
    check(library, library.nvrtcDestroyProgram(ctypes.byref(program)))
    return cubin.raw


def sections(elf):
    """Name → bytes of every section of a 64-bit little-endian ELF file."""
    offset, = struct.unpack_from("<Q", elf, 40)
    entry, count, names = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, offset + index * entry) for index in range(count)]
    name_start = headers[names][4]
    found = {}
    for header in headers:
        start = name_start + header[0]
        name = elf[start:elf.index(b"\0", start)].decode()
        found[name] = elf[header[4]:header[4] + header[5]]
    return found


def attributes(info):
    """(attribute, symbol, value) of every record of .nv.info that has two words."""
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != 4:  # the value is `size` itself
            continue
        if size == 8:
            yield (attribute, *struct.unpack_from("<II", info, at))
        at += size


def resources(cubin):
    """Kernel → {attribute: value}."""
    found = sections(cubin)
    symbols, strings = found[".symtab"], found[".strtab"]

    def name(symbol):
        start, = struct.unpack_from("<I", symbols, symbol * 24)
        return strings[start:strings.index(b"\0", start)].decode()

    kernels = {}
    for attribute, symbol, value in attributes(found[".nv.info"]):
        kernels.setdefault(name(symbol), {})[attribute] = value
    return {kernel: values for kernel, values in kernels.items() if f".text.{kernel}" in found}, found


def main():
    nvrtc, source_folder, out = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
    # NVRTC opens its builtins by name alone: it finds them when they are loaded already.
    for builtins in pathlib.Path(nvrtc).parent.glob("libnvrtc-builtins.so*"):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(nvrtc)
    library.nvrtcCreateProgram.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int,
                                           ctypes.c_void_p, ctypes.c_void_p]
    out.mkdir(parents=True, exist_ok=True)
    headers = sorted(path for path in source_folder.glob("*.h") if path.name != "emulate.h")
    spilled, total = [], 0
    for architecture in ARCHITECTURES:
        for source in sorted(source_folder.glob("*.cu")):
            cubin = compile_source(library, source, headers, architecture)
            kernels, found = resources(cubin)
            if not kernels:
                raise SystemExit(f"cubins: no kernel found in {source.name} for {architecture}")
            for kernel, values in sorted(kernels.items()):
                registers = values.get(REGISTERS, 0)
                local = max(values.get(FRAME_SIZE, 0), values.get(STACK_SIZE, 0))
                code = len(found[f".text.{kernel}"])
                print(f"{architecture} {kernel:24} {registers:3} registers {local:4} bytes of local memory {code:6} bytes")
                if local > 0:
                    spilled.append(f"{kernel} for {architecture}")
            (out / f"{source.stem}.{architecture}.cubin").write_bytes(cubin)
            total += len(cubin)
    print(f"cubins: {total} bytes")
    if spilled:
        raise SystemExit(f"cubins: these spill registers to local memory: {', '.join(spilled)}")


main()
