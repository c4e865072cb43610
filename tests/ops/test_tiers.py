"""AVX-512 VNNI, AVX2 and plain code on one machine: the same bits."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from .tier_digests import digests

pytestmark = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="x86 tiers need an x86 CPU"
)
ROOT = Path(__file__).parents[2]
AVX2 = "+sse4.2,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt"
# name, CPU, features, an instruction set the tier must have, one it must not have
TIERS = [
    ("avx2", "haswell", AVX2, "avx2", "avx512f"),
    ("plain", "x86-64", "+sse2", "sse2", "avx"),
]


@pytest.fixture(scope="module")
def started():
    """One process per tier, side by side: most of the time is compilation."""
    processes = {}
    for tier, cpu, features, *_ in TIERS:
        environment = {**os.environ, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
        environment["PYTHONPATH"] = str(ROOT)
        processes[tier] = subprocess.Popen(
            [sys.executable, "-m", "tests.ops.tier_digests"],
            env=environment, cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    yield processes
    for process in processes.values():
        process.kill()


@pytest.fixture(scope="module")
def here(started):
    return digests()


@pytest.mark.parametrize(("tier", "cpu", "features", "has", "lacks"), TIERS)
def test_tier_has_the_same_bits(started, here, tier, cpu, features, has, lacks):
    output, errors = started[tier].communicate()
    assert started[tier].returncode == 0, errors[-2000:]
    there = json.loads(output)
    assert has in there["features"]
    assert lacks not in there["features"]
    assert len(here) > 40
    different = [case for case in here if here[case] != there["digests"].get(case)]
    assert not different, f"{tier}: {len(different)} of {len(here)} differ, first {different[0]}"
