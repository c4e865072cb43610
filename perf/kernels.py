"""The matrix product of each format under the clock.

    python -m perf.kernels --formats pn4t,pn3t --shapes 4096x14336 --tokens 1,512

A number is only printed for a product whose first rows have the reference's bits.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import time

import numpy as np

from pnrt import jit, reference
from pnrt.bench import machine
from pnrt.cpu import matmul, pack
from pnrt.formats import FORMATS
from pnrt.testing import assert_bits_equal


def random_rows(name: str, n: int, k: int) -> np.ndarray:
    """Random codes under small finite scales: [n, row bytes] uint8."""
    form, rng = FORMATS[name], np.random.default_rng(0)
    rows = rng.integers(0, 256, (n, form.row_bytes(k)), dtype=np.uint8)
    blocks = rows.reshape(-1, form.nbytes)
    halves = len(pack.CODECS[name].planes)
    scales = (rng.standard_normal((len(blocks), halves)) * 0.01).astype(np.float16)
    blocks[:, : 2 * halves] = scales.view(np.uint8).reshape(len(blocks), -1)
    if name == "pn3t":
        blocks[:, 3::2] &= 0x7F
    return rows


def timed(script: jit.Script, threads: int, seconds: float = 1.0) -> tuple[float, float]:
    """Median and smallest seconds of a run, warm."""
    script.run(threads)
    times, end = [], time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        script.run(threads)
        times.append(time.perf_counter() - start)
    return float(np.median(times)), min(times)


def read_bandwidth(threads: int) -> float:
    """GB/s of a parallel sum over 256 MiB: what this machine's memory gives right now."""
    from pnrt.cpu.simd import add_i, load_i32, read_i64, store_i32

    @jit.kernel(name="perf_read")
    def read(a, thread, threads):
        data, nbytes, out = read_i64(a), read_i64(a + 8), read_i64(a + 16)
        first = nbytes * thread // threads // 256 * 256
        last = nbytes * (thread + 1) // threads // 256 * 256
        s0 = s1 = s2 = s3 = load_i32(data)
        for p in range(data + first, data + last, 256):
            s0, s1 = add_i(s0, load_i32(p)), add_i(s1, load_i32(p + 64))
            s2, s3 = add_i(s2, load_i32(p + 128)), add_i(s3, load_i32(p + 192))
        store_i32(out + thread * 64, add_i(add_i(s0, s1), add_i(s2, s3)))

    data, out = pack.aligned(1 << 28), pack.aligned(64 * threads)
    data[:] = 1
    call = jit.Call(read, jit.words(data, data.nbytes, out), (data, out))
    return data.nbytes / timed(jit.Script([call]), threads)[0] / 1e9


def measure(name: str, n: int, k: int, tokens: int, threads: int, bandwidth: float) -> dict:
    """One row of the table."""
    rows = random_rows(name, n, k)
    start = time.perf_counter()
    weight = pack.pack(name, rows, k, threads)
    packing = time.perf_counter() - start
    count = 1 if tokens == 1 else matmul.TILE
    x = np.random.default_rng(1).standard_normal((tokens, k)).astype(np.float32)
    inputs = matmul.Activations(k, tokens, "q8_0", count)
    whole = -(-tokens // count) * count
    out = np.full((whole, weight.panels * pack.ROWS), np.nan, np.float32)
    control, bad = np.array([tokens, 0], np.int64), np.zeros(1, np.int32)
    stack = pack.aligned(threads * matmul.STACK)
    quantize = jit.Script([inputs.fill(x, control, bad)])
    product = jit.Script([matmul.matmul(weight, inputs, out, control, stack)])
    compiling = quantize.compile() + product.compile()
    quantize.run(threads)
    product.run(threads)
    expected = reference.matmul(name, rows[:4], x[:2])
    assert_bits_equal(name, expected, out[: min(2, tokens), :4])
    median, best = timed(product, threads)
    return {
        "format": name, "N": n, "K": k, "T": tokens, "threads": threads,
        "median_us": median * 1e6, "best_us": best * 1e6,
        "gweights_per_s": n * k * tokens / median / 1e9,
        "gflops": 2 * n * k * tokens / median / 1e9,
        "gb_per_s": weight.nbytes / median / 1e9,
        "of_read_bandwidth": weight.nbytes / median / 1e9 / bandwidth,
        "quantize_us": timed(quantize, threads, 0.2)[0] * 1e6,
        "compile_s": compiling, "pack_gb_per_s": rows.nbytes / packing / 1e9,
    }  # fmt: skip


def llama_product(tool: str, kind: str, n: int, k: int, tokens: int) -> float | None:
    """GFLOP/s of llama.cpp's product by `test-backend-ops perf`, None if it has no such case."""
    case = f"type_a={kind},type_b=f32,m={n},n={tokens},k={k}"
    command = [tool, "perf", "-b", "CPU", "-o", "MUL_MAT", "-p", case]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"([\d.]+) ([GT])FLOPS", done.stdout)
    return float(found[1]) * (1000 if found[2] == "T" else 1) if found else None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", default="pn4t,pn3t,q8_0,q4_0,q4_1")
    parser.add_argument("--shapes", default="4096x14336,17408x5120", help="NxK, comma separated")
    parser.add_argument("--tokens", default="1,512")
    parser.add_argument("--threads", type=int, default=jit.default_threads()[0])
    parser.add_argument("--llama", help="path of llama.cpp's test-backend-ops, to run beside")
    parser.add_argument("--llama-type", default="q4_K")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    bandwidth, results = read_bandwidth(options.threads), []
    for name in options.formats.split(","):
        for shape in options.shapes.split(","):
            n, k = map(int, shape.split("x"))
            if k % FORMATS[name].block:
                continue
            for tokens in map(int, options.tokens.split(",")):
                row = measure(name, n, k, tokens, options.threads, bandwidth)
                theirs = options.llama and llama_product(
                    options.llama, options.llama_type, n, k, tokens
                )
                if theirs:
                    row |= {"llama_gflops": theirs, "ratio": row["gflops"] / theirs}
                results.append(row)
    if options.json:
        facts = {"machine": machine(), "read_gb_per_s": bandwidth, "results": results}
        print(json.dumps(facts, indent=1))
        return
    print(f"read bandwidth {bandwidth:.1f} GB/s, {options.threads} threads")
    for r in results:
        print(
            f"{r['format']:<6}{r['N']:>6} x {r['K']:<6} T={r['T']:<4} {r['median_us']:>10.0f} us "
            f"(best {r['best_us']:.0f}) {r['gweights_per_s']:>8.1f} Gw/s "
            f"{r['gb_per_s']:>6.1f} GB/s = {100 * r['of_read_bandwidth']:.0f} % {r['gflops']:>7.0f} GFLOP/s"
            + (f"  {r['ratio']:.2f} x llama.cpp" if "ratio" in r else "")
        )


if __name__ == "__main__":
    main()
