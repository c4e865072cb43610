"""--nan-stop and --dispatch: planted NaNs and overflows are named, kernels are counted."""

import json

import numpy as np
import pytest

import pnrt as package
from pnrt.backend import Tap
from pnrt.container.gguf import open_gguf
from pnrt.debug.dispatch import Dispatch
from pnrt.debug.nanstop import NanStop, NotFinite

from ..commands import pnrt
from ..golden_models import load_golden, path_of

PN = path_of("llama_m.pn")
HALF_NAN, HALF_LARGE = b"\x00\x7e", b"\xff\x7b"


def planted(tmp_path, tensor, at, data, source=PN):
    """A copy of a model with bytes of a tensor replaced, and the offset in the file."""
    copy = tmp_path / "planted.gguf"
    copy.write_bytes(source.read_bytes())
    with open_gguf(copy) as file:
        offset = file.tensors[tensor].offset + at
    with open(copy, "r+b") as stream:
        stream.seek(offset)
        stream.write(data)
    return copy, offset


def stopped(path, **options):
    options = {"rotation": "none", "validate": False, **options}
    with package.load(path, **options) as model:
        model.session.observer = NanStop(model.file, model.session.activations)
        with pytest.raises(NotFinite) as caught:
            model.eval([5, 6, 7])
        names = [step.name for step in model.program.steps]
    message = str(caught.value)
    assert f"The {names.index(message.split(':')[0])} steps before it were finite" in message
    return message


def row_bytes(tensor):
    with open_gguf(PN) as file:
        return file.rows(tensor).shape[1]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_nan_scale_is_named_with_its_block(tmp_path, backend):
    tensor = "blk.1.ffn_up.weight"
    path, byte = planted(tmp_path, tensor, 3 * row_bytes(tensor) + 2 * 34, HALF_NAN)
    message = stopped(path, backend=backend)
    assert message.startswith("blk.1.ffn_up: NaN at position 0, row 3 of blk.1.ffn_up.weight")
    assert f"{tensor} row 3 block 2 (byte {byte:#x}): scale d is nan" in message


def test_a_nan_norm_weight(tmp_path):
    path, _ = planted(tmp_path, "blk.0.ffn_norm.weight", 4 * 17, np.float32(np.inf).tobytes())
    message = stopped(path)
    assert message.startswith("blk.0.ffn_norm: -infinity at position 0, element 17")
    assert "blk.0.ffn_norm.weight element 17 is +infinity" in message


def test_a_nan_in_the_embedding_names_the_row(tmp_path):
    tensor = "token_embd.weight"
    with open_gguf(PN) as file:
        size, form = row_bytes(tensor), file.tensors[tensor].format
        assert form.name == "q8_0"
    path, byte = planted(tmp_path, tensor, 6 * size + form.nbytes, HALF_NAN)
    message = stopped(path)
    assert message.startswith("token_embd: NaN at position 1, element 32")
    assert f"row 6 block 1 (byte {byte:#x})" in message


def test_a_sum_that_overflows_names_its_unit(tmp_path):
    tensor, source = "blk.0.ffn_up.weight", path_of("llama_s.f32")
    row = np.ones(64, np.float32)
    row[32:] = np.float32(3e38) * np.where(np.arange(32) % 2, 1, -1)
    path, _ = planted(tmp_path, tensor, 2 * row.nbytes, row.tobytes(), source)
    message = stopped(path, rotation=None)
    assert message.startswith("blk.0.ffn_up: ")
    assert f"row 2 of {tensor}" in message
    assert f"the sum over {tensor} row 2 leaves float32's range in its blocks 32 to 63" in message


def test_input_too_large_for_8_bits(tmp_path):
    path, _ = planted(tmp_path, "blk.0.ffn_norm.weight", 4 * 9, np.float32(1e9).tobytes())
    message = stopped(path)
    assert message.startswith("blk.0.ffn_gate: its input h is ")
    assert "element 9" in message
    assert "Use --activations f32" in message


def test_a_sound_model_passes():
    with load_golden("llama_m.pn") as model:
        stop = NanStop(model.file, "q8_0")
        model.session.observer = stop
        model.eval([5, 6, 7])
        assert stop.passed == len(model.program.steps)


def test_nan_stop_is_exit_1(tmp_path):
    path, _ = planted(tmp_path, "blk.0.ffn_up.weight", 0, HALF_NAN)
    out = tmp_path / "out.trace"
    for command in (["run", "-n", "1"], ["logits", "-o", out], ["trace", "-o", out]):
        done = pnrt(command[0], path, "-p", "x", "--rotation", "none", "--nan-stop", *command[1:])
        assert done.exit_code == 1, command
        assert "blk.0.ffn_up.weight row 0 block 0" in done.stderr
        assert not out.exists()


def test_dispatch_counts_calls_bytes_and_kernels():
    with load_golden("llama_m.pn") as model:
        counter = Dispatch(model)
        model.session.observer = counter
        model.eval([1, 2, 3])
        model.eval([4])
        report = counter.report()
        packed = {name: model.session.weights[name].nbytes for name in model.program.matrices()}
    rows = report["rows"]
    assert report["fallbacks"] == 0
    products = [r for r in rows if r["op"] == "matmul" and not r["prepares"]]
    matmuls = [s for s in model.program.steps if s.op == "matmul"]
    assert sum(r["calls"] for r in products) == 2 * len(matmuls)
    assert sum(r["bytes"] for r in products) == 2 * sum(packed[s.weights[0]] for s in matmuls)
    assert {r["T"] for r in products} == {1, 3}
    assert {r["format"] for r in products} == {"pn3t", "pn4t", "q8_0"}
    assert all(r["seconds"] > 0 for r in rows)
    unused = {r["kernel"] for r in report["never_used"]}
    assert "matmul_bf16" in unused
    assert "matmul_pn3t" not in unused


@pytest.mark.parametrize(
    ("kernel", "fallback"),
    [
        ("matmul_pn3t_q8_0_1", False),
        ("matmul_80_amx_16", False),
        ("matmul_pn4t_q8_0_1", True),
        ("matmul_pn3t_f32_1", True),
        ("matmul_f32_f32_8", True),
        ("decode_pn3t", True),
    ],
)
def test_a_kernel_of_another_op_format_or_precision_is_a_fallback(kernel, fallback):
    with load_golden("llama_m.pn") as model:
        counter = Dispatch(model)
        step = next(s for s in model.program.steps if s.name == "blk.0.ffn_up")
        assert model.file.tensors[step.weights[0]].format.name == "pn3t"
        calls = (("quantize_q8_0", 1e-6, 0), (kernel, 1e-6, 10))
        counter(Tap(step, 0, 1, lambda: None, calls))
        counter(Tap(step, 1, 1, lambda: None, calls))
        report = counter.report()
    assert report["fallbacks"] == (2 if fallback else 0)
    assert [r["fallback"] for r in report["rows"]] == [False, fallback]


def test_dispatch_on_the_command_line(tmp_path):
    done = pnrt("run", PN, "-p", "x", "-n", "1", "--rotation", "none", "--dispatch", "--json")
    assert done.exit_code == 0
    json.loads(done.stdout)
    assert "fallbacks: 0" in done.stderr
    assert "activations q8_0 (f32 where the weights are floats), cache f16" in done.stderr
    assert "quantize_q8_0 (prepares)" in done.stderr
    assert "never used" in done.stderr
