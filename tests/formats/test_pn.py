"""PN: the historical bug's worked examples, the reserved bits, the compiled search's tiers."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from pnrt.formats import FORMATS, Finding
from tests.formats.report import assert_blocks_equal

# FORMATS 1.2: first word, the other seven, what a dot with 1, 2, 3, ... gives
EXAMPLES = {"pn3t": (0x6F591D10, 0x49244924, 17), "pn4t": (0xFD31EC20, 0x88888888, 88)}


def example(name: str) -> np.ndarray:
    first, rest, _ = EXAMPLES[name]
    words = np.array([first] + [rest] * 7, "<u4")
    return np.concatenate([np.array([1.0], "<f2").view(np.uint8), words.view(np.uint8)])[None]


@pytest.mark.parametrize("name", EXAMPLES)
def test_worked_example_decodes_and_multiplies(name):
    form, count = FORMATS[name], 10 if name == "pn3t" else 8
    x = np.zeros(form.block, np.float32)
    x[:count] = np.arange(1, count + 1)
    assert form.decode(example(name))[0] @ x == EXAMPLES[name][2]
    assert form.parts(example(name)).codes[0] @ x == EXAMPLES[name][2]


@pytest.mark.parametrize("name", EXAMPLES)
def test_worked_example_comes_back_from_the_quantizer(name):
    form, rows = FORMATS[name], example(name)
    x = form.decode(rows)
    assert_blocks_equal("compiled", rows, form.quantize(x), 34)
    assert_blocks_equal("plain", rows, form.quantize_reference(x), 34)


def test_reserved_bits_are_named():
    rows = np.repeat(example("pn3t"), 2, axis=1)
    rows[0, 34 + 2 + 4 * 3 + 3] |= 0x80
    rows[0, 34 + 2 + 4 * 3 + 1] |= 0x80
    allowed = "pn3t reserves bits 15 and 31"
    expected = [Finding(0, 1, 48, "word 3 has bit 15 and 31 set", allowed)]
    assert FORMATS["pn3t"].findings(rows) == expected


SEARCHED = ("pn4t", "q3_K", "q4_K", "q6_K", "iq4_nl")
SCRIPT = f"""
import hashlib, numpy as np
from pnrt.formats import FORMATS
x = np.random.default_rng(9).standard_t(3, (24, 256)).astype(np.float32)
for name in {SEARCHED}:
    print(hashlib.sha256(FORMATS[name].quantize(x, threads=1)).hexdigest())
"""


@pytest.mark.parametrize(
    ("cpu", "features"), [("haswell", "+avx2,+fma,+f16c"), ("x86-64", "")], ids=["avx2", "plain"]
)
def test_searches_give_the_same_bytes_on_every_instruction_set(cpu, features):
    x = np.random.default_rng(9).standard_t(3, (24, 256)).astype(np.float32)
    judges = [FORMATS[name].quantize_reference(x) for name in SEARCHED]
    forced = {**os.environ, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=forced, capture_output=True, text=True, check=False
    )
    assert found.stdout.split() == [hashlib.sha256(j).hexdigest() for j in judges], found.stderr
