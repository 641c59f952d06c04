"""Parts of gpu-check.sh that are Python: PyTorch's full prefill of the 14B shape, and the table of all parts.

usage: gpu-check.py baseline --device cuda:0 --tokens 16384
       gpu-check.py table FOLDER OUT.json
"""
import argparse
import json
import pathlib
import statistics
import time

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCABULARY = 48, 5120, 40, 8, 128, 13824, 151936


def baseline(device, tokens):
    """Full causal prefill with random weights: the library's own norm, matrix products and attention, one stream."""
    import torch
    import torch.nn.functional as F

    torch.manual_seed(1)
    torch.cuda.set_device(device)

    def matrix(rows, columns):
        return (torch.randn(rows, columns, device=device, dtype=torch.bfloat16) * columns ** -0.5)

    width = (HEADS + 2 * KV_HEADS) * DIM
    layers = [(matrix(width, HIDDEN), torch.zeros(width, device=device, dtype=torch.bfloat16), matrix(HIDDEN, HEADS * DIM),
               matrix(2 * INNER, HIDDEN), matrix(HIDDEN, INNER)) for _ in range(LAYERS)]
    norm = torch.ones(HIDDEN, device=device, dtype=torch.bfloat16)
    embedding, head = matrix(VOCABULARY, HIDDEN), matrix(VOCABULARY, HIDDEN)
    angles = torch.outer(torch.arange(tokens, device=device, dtype=torch.float32),
                         1e6 ** (-torch.arange(DIM // 2, device=device, dtype=torch.float32) / (DIM // 2)))
    cosines, sines = angles.cos()[:, None], angles.sin()[:, None]

    def rotate(heads):
        first, second = heads.float().chunk(2, -1)
        return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1).bfloat16()

    def prefill(ids):
        hidden = F.embedding(ids, embedding)
        for qkv, bias, output, gate_up, down in layers:
            heads = F.linear(F.rms_norm(hidden, (HIDDEN,), norm, 1e-6), qkv, bias).view(tokens, -1, DIM)
            query, key, value = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
            query, key = rotate(query), rotate(key)
            attention = F.scaled_dot_product_attention(
                query.transpose(0, 1)[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None],
                is_causal=True, enable_gqa=True)
            hidden = hidden + F.linear(attention[0].transpose(0, 1).reshape(tokens, -1), output)
            gate, up = F.linear(F.rms_norm(hidden, (HIDDEN,), norm, 1e-6), gate_up).chunk(2, -1)
            hidden = hidden + F.linear(F.silu(gate) * up, down)
        return int(F.linear(F.rms_norm(hidden[-1:], (HIDDEN,), norm, 1e-6), head).argmax())

    ids = torch.randint(VOCABULARY, (tokens,), device=device)
    times = []
    with torch.inference_mode():
        for turn in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            prefill(ids)
            torch.cuda.synchronize()
            if turn >= 2:
                times.append((time.perf_counter() - start) * 1e3)
    print(json.dumps({"tokens": tokens, "torch": torch.__version__, "device": torch.cuda.get_device_name(device),
                      "median_ms": statistics.median(times), "spread_ms": [min(times), max(times)]}))


def read(path):
    try:
        lines = [line for line in path.read_text().splitlines() if line.startswith("{")]
        return json.loads(lines[-1]) if lines else None
    except (OSError, ValueError):
        return None


def number(value, digits=0):
    return "-" if value is None else f"{value:.{digits}f}"


def table(folder, out):
    folder = pathlib.Path(folder)
    parts = {path.stem: read(path) for path in sorted(folder.glob("*.json"))}
    parts = {name: part for name, part in parts.items() if part}
    failures = {path.stem: path.read_text() for path in sorted(folder.glob("*.failed"))}
    pathlib.Path(out).write_text(json.dumps({"parts": parts, "failures": failures}, indent=1) + "\n")
    kernels = parts.get("kernels")
    if kernels:
        print(kernels["device"])
        print(f"parity: {len(kernels['parity']) - len(kernels['parity_failed'])} of {len(kernels['parity'])} hold")
        for name in kernels["parity_failed"]:
            print(f"  FAILS {name}")
        for figure in [kernels["peak"], *kernels["figures"]]:
            print(f"{figure['what']:60} {figure['median_ms']:9.3f} ms {figure['tflops']:7.1f} TFLOPS "
                  f"{100 * figure['share_of_peak']:5.1f} % of the peak")
    print(f"\n{'tokens':>7} {'torch ms':>9} {'full ms':>9} {'direct ms':>9} {'clip ms':>9} {'ratio':>5} "
          f"{'full/clip':>9} {'best/clip':>9}")
    for name, part in parts.items():
        if not name.startswith("ttft-"):
            continue
        _, tokens, ratio = name.split("-")
        torch_ms = (parts.get(f"torch-{tokens}") or {}).get("median_ms")
        times = part["ttft_ms"]
        full, clip = times.get("full"), times.get("clip")
        best = min(value for value in (torch_ms, full) if value is not None) if full else None
        print(f"{tokens:>7} {number(torch_ms):>9} {number(full):>9} {number(times.get('direct')):>9} {number(clip):>9} "
              f"{ratio:>5} {number(full / clip if full and clip else None, 2):>9} "
              f"{number(best / clip if best and clip else None, 2):>9}")
    for name in failures:
        print(f"FAILED: {name}")


def main():
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    baseline_flags = commands.add_parser("baseline")
    baseline_flags.add_argument("--device", default="cuda:0")
    baseline_flags.add_argument("--tokens", type=int, default=16384)
    table_flags = commands.add_parser("table")
    table_flags.add_argument("folder")
    table_flags.add_argument("out")
    flags = parser.parse_args()
    if flags.command == "baseline":
        baseline(flags.device, flags.tokens)
    else:
        table(flags.folder, flags.out)


main()
