"""The measuring scripts run and report; nothing here looks at a clock's reading."""

import json

from perf import kernels, model

from .golden_models import path_of


def test_kernels(capsys):
    kernels.main(["--formats", "pn4t", "--shapes", "32x128", "--tokens", "1,8", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["read_gb_per_s"] > 0
    assert [row["T"] for row in report["results"]] == [1, 8]
    assert all(row["gflops"] > 0 for row in report["results"])


def test_model(capsys):
    model.main([str(path_of("llama_s.f32")), "-p", "8", "-n", "3", "-r", "2", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["prompt_8"]["median"] > 0
    assert report["generation_3"]["min"] <= report["generation_3"]["max"]
