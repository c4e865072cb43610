"""Every kernel compiles for the P100 without one: registers, no spills, rounding as written."""

import importlib.metadata

import pytest

from pnrt.cuda import build


def _missing() -> str:
    for package in ("numba-cuda", "nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink-cu12", "cuda-core"):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"compiling for sm_60 needs {package}: pip install 'pnrt[cuda]'"
    return ""


compiles = pytest.mark.skipif(bool(_missing()), reason=_missing())


@compiles
@pytest.mark.parametrize("kernel", build.kernels(), ids=lambda k: k.name)
def test_a_kernel_fits_the_p100(kernel):
    built = build.build(kernel)
    assert build.audit(built.ptx) == []
    assert (built.spills, built.local) == (0, 0)
    assert 0 < built.registers <= kernel.registers
    # 65536 registers and 48 KB of shared memory serve at least one block
    assert built.registers * kernel.threads <= 65536
    assert built.shared <= 48 * 1024


def test_every_kernel_has_a_name_of_its_own():
    names = [k.name for k in build.kernels()]
    assert len(names) == len(set(names)) > 0


@pytest.mark.parametrize(
    "line",
    [
        "mul.f64 %fd1, %fd2, %fd3;",
        "cvt.f64.f32 %fd1, %f2;",
        "fma.rn.f32 %f1, %f2, %f3, %f4;",
        "add.f32 %f1, %f2, %f3;",
        "// begin inline asm\n add.ftz.f32 %f1, %f2, %f3;\n// end inline asm",
        "div.full.f32 %f1, %f2, %f3;",
        "fma.rn.f16x2 %r1, %r2, %r3, %r4;",
        "// begin inline asm\n sqrt.approx.f32 %f1, %f2;\n// end inline asm",
    ],
)
def test_the_audit_sees(line):
    assert len(build.audit(line)) == 1


def test_the_audit_passes_what_is_ours():
    text = (
        "// begin inline asm\n fma.rn.f32 %f1, %f2, %f3, %f4;\n// end inline asm\n"
        "cvt.f32.f16 %f1, %rs1;\n mad.lo.s32 %r1, %r2, %r3, %r4;\n setp.lt.f32 %p1, %f1, %f2;"
    )
    assert build.audit(text) == []


@compiles
def test_a_cubin_is_kept_and_a_damaged_one_made_anew(tmp_path, monkeypatch):
    kernel = next(k for k in build.kernels() if k.name == "rms_norm")
    monkeypatch.setattr(build, "cache_directory", lambda: tmp_path)
    first = build.cached(kernel, build.P100)
    (path,) = tmp_path.iterdir()
    assert build.cached(kernel, build.P100)._replace(ptx="") == first._replace(ptx="")
    path.write_bytes(path.read_bytes()[:-10])
    assert build.cached(kernel, build.P100).cubin == first.cubin
    assert path.stat().st_size > len(first.cubin)
