"""A few kernels on numba's CUDA simulator: the checks of the other modules, another machine."""

import numpy as np
import pytest

from pnrt import reference
from pnrt.cuda import argmax
from pnrt.cuda.kernel import KernelError, kernel
from pnrt.cuda.lanes import at, f32, shuffle_xor, store_f32, thread, u64
from pnrt.testing import assert_bits_equal

from . import test_language, test_matmul, test_steps

reason = "numba.cuda.simulator is not in this numba: kernels run on the stand-in only"
pytest.importorskip("numba.cuda.simulator.kernel", reason=reason)

from .simulator import Simulator  # noqa: E402


class Machine(Simulator, test_steps.Machine):
    """Arrays in place of addresses."""


@pytest.fixture
def machine():
    return Machine()


def test_a_norm(machine):
    test_steps.test_rms_norm(machine, 100)


def test_a_rotation_through_shared_memory(machine):
    test_steps.test_hadamard(machine, 64, 64, True)


def test_attention(machine):
    test_steps.test_attention_over_the_cache(machine, "f16", 2, 1, 1, 1, 20)


def test_argmax_of_two_blocks(machine):
    x = np.round(test_steps.floats(520))
    x[[300, 519]] = x.max() + 1
    scratch = machine.allocate((argmax.BLOCKS + 1) * 8)
    machine.run(argmax.largest(machine.upload(x), 520, scratch))
    assert machine.read(scratch + 4, (1,), np.int32)[0] == 300


@pytest.mark.parametrize(("name", "k"), [("pn3t", 240), ("pn4t", 320)])
def test_a_tuned_product(monkeypatch, name, k):
    monkeypatch.setattr(test_matmul, "StandIn", Simulator)
    rows, x = test_matmul.random_rows(name, 1, k), test_matmul.random_x(1, k)
    got, bad = test_matmul.multiply(name, rows, k, x, "q8_0")
    assert_bits_equal(name, reference.matmul(name, rows, x), got)
    assert bad == 0


@pytest.mark.parametrize("check", ["threads_part_and_meet_again", "lanes_exchange"])
def test_the_language(monkeypatch, check):
    monkeypatch.setattr(test_language, "StandIn", Simulator)
    getattr(test_language, f"test_{check}")()


def test_a_shuffle_waits_for_the_whole_warp(monkeypatch):
    @kernel(threads=32)
    def half(out: u64):
        if thread() < 16:
            store_f32(at(out, thread(), 4), shuffle_xor(f32(1), 1))

    monkeypatch.setattr(Simulator, "patience", 0.1)
    monkeypatch.setattr(test_language, "StandIn", Simulator)
    with pytest.raises(KernelError, match=r"half: lane \d+ waited 0.1 s for its warp"):
        test_language.run(half)
