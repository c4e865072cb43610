"""pnrt diff on the command line: exit status, screens, JSON, the HTML report, wrong usage."""

import json
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from pnrt.container.gguf import open_gguf
from pnrt.debug.diff import Report, StepDifference
from pnrt.screen.heatmap import colour, page

from ..commands import pnrt
from ..golden_models import path_of

Q4, TINY = path_of("llama_m.q4_0"), path_of("llama_s.f32")
IDS = ("--tokens", "1,2,3,4,5")


@pytest.fixture(scope="module")
def flipped(tmp_path_factory):
    """The q4_0 model with one bit of blk.1.ffn_up row 9 flipped."""
    path = tmp_path_factory.mktemp("diff") / "flipped.gguf"
    data = bytearray(Q4.read_bytes())
    with open_gguf(Q4) as file:
        tensor = "blk.1.ffn_up.weight"
        data[file.tensors[tensor].offset + 9 * file.rows(tensor).shape[1] + 2] ^= 0x80
    path.write_bytes(data)
    return path


def test_equal_sides_are_exit_0():
    done = pnrt("diff", Q4, "cpu", "reference", *IDS)
    assert done.exit_code == 0
    assert "all 36 steps agree to the bit" in done.stdout
    answer = json.loads(pnrt("diff", Q4, "cpu", "reference", *IDS, "--json").stdout)
    assert answer["equal"] is True
    assert len(answer["reports"][0]["steps"]) == 36


def test_two_files_are_exit_1_and_the_screen_names_the_block(flipped):
    done = pnrt("diff", Q4, flipped, "-p", "hello", "--all")
    assert done.exit_code == 1
    out = " ".join(done.stdout.split())
    assert "first difference: blk.1.ffn_up at position 0, element 9" in out
    assert "blk.1.ffn_gate the last" in out
    assert "blk.1.ffn_up.weight row 9 block 0 (byte.bit 2.4, 2.5, 2.6, 2.7 of the block)" in out
    assert "each side computes what its own file says" in out


@pytest.mark.parametrize("option", [("--split", "1,3,all"), ("--threads", "1,2"),
                                    ("--tier", "native,avx2")])  # fmt: skip
def test_variants_of_one_run(option):
    done = pnrt("diff", TINY, *option, *IDS)
    if "no avx2" in done.stderr:
        pytest.skip(done.stderr)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.count("steps agree to the bit") == (2 if option[0] == "--split" else 1)


def test_record_here_compare_there(flipped, tmp_path):
    """A trace, then only the trace and a model: tokens and settings come from the trace."""
    trace = tmp_path / "run.trace"
    made = pnrt("trace", Q4, *IDS, "--full", "-o", trace, "--activations", "f32", "--chunk", "2")
    assert made.exit_code == 0
    assert pnrt("diff", trace, Q4).exit_code == 0
    assert pnrt("diff", Q4, "reference", trace).exit_code == 0
    done = pnrt("diff", trace, flipped, "--json")
    assert done.exit_code == 1
    report = json.loads(done.stdout)["reports"][0]
    assert report["blame"]["step"] == "blk.1.ffn_up"
    # the trace is judged with the flipped file's weights, the only ones there
    assert report["blame"]["again"] == {"A": "a recorded run", "B": "the same bits"}
    assert pnrt("diff", trace, trace).exit_code == 0
    refused = pnrt("diff", trace, Q4, "--tokens", "1,2")
    assert refused.exit_code == 2
    assert "the trace ran 5 others" in refused.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([Q4], "`diff A B`"),
        ([Q4, "cpu", "reference", "x", *IDS], "4 names"),
        (["cpu", "reference", *IDS], "needs a model"),
        ([Q4, "cpu", "gpu", *IDS], "is no file and no side"),
        ([Q4, "cpu", "cpu:sse9", *IDS], "Allowed: native, avx512, avx2, plain"),
        ([Q4, "nowhere.gguf", *IDS], "nowhere.gguf"),
        ([Q4, "cpu", "reference"], "-p TEXT or --tokens"),
        ([Q4, "cpu", "reference", "--tokens", "1,x"], "whole numbers"),
        ([Q4, "cpu", "reference", "--tokens", "99999"], "ids are 0 to"),
        ([Q4, "--split", "1", *IDS], "two or more"),
        ([Q4, "--split", "0,1", *IDS], "--split 0"),
        ([Q4, "--threads", "1,two", *IDS], "--threads two"),
        ([Q4, "cpu", "reference", *IDS, "--tolerance", "-1"], "tolerance"),
        ([__file__, "cpu", "reference", *IDS], "GGUF"),
        ([Q4, __file__, *IDS], "GGUF"),
    ],
    ids=lambda value: None if isinstance(value, list) else value[:12],
)
def test_wrong_usage_is_exit_2(args, words):
    done = pnrt("diff", *args)
    assert done.exit_code == 2, done.output
    assert words in done.output


def test_cuda_is_refused_where_it_is_absent(monkeypatch):
    from pnrt.cuda import launch

    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    done = pnrt("diff", Q4, "cpu", "cuda", *IDS)
    assert done.exit_code == 2
    assert "cuda" in done.stderr


class Reader(HTMLParser):
    """Tags that are opened and closed in order, and their attributes."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def read_page(text):
    reader = Reader()
    reader.feed(text)
    assert not reader.open
    assert not {"script", "link", "img", "iframe"} & set(reader.tags)
    assert not {"src", "href", "onload", "onclick"} & {name for name, _ in reader.attributes}
    assert "http" not in text
    return reader


def test_the_page_stands_alone(flipped, tmp_path):
    out = tmp_path / "diff.html"
    assert pnrt("diff", Q4, flipped, *IDS, "--html", out).exit_code == 1
    text = out.read_text("utf-8")
    reader = read_page(text)
    assert reader.tags.count("rect") == 36
    assert text.count(' first"') == 1
    assert "blk.1.ffn_up.weight row 9 block 0" in text
    # the map is well-formed, and every step has a place of its own on it
    svg = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    width, height = int(svg.get("width")), int(svg.get("height"))
    cells = [[int(r.get(k)) for k in ("x", "y", "width", "height")] for r in svg.iter("rect")]
    assert len({(x, y) for x, y, *_ in cells}) == 36
    assert all(0 <= x <= width - w and 0 <= y <= height - h for x, y, w, h in cells)


def test_the_page_escapes_what_files_say():
    hostile = '<script>alert("x")</script>'
    run = {
        "model": {"name": hostile, "sha256": "", "bytes": 0, "architecture": hostile},
        "backend": hostile, "device": hostile, "threads": 1, "activations": "q8_0", "kv": "f16",
        "tokens": [1], "chunk": 1, "versions": {"pnrt": hostile},
    }  # fmt: skip
    steps = [StepDifference(f"blk.0.{hostile}", hostile), StepDifference(hostile, "add", "differs")]
    report = Report(hostile, hostile, [run, run], 0.0, steps, [hostile], 1)
    report.blame = {
        "inputs": [hostile], "weights": [hostile], "again": {"A": hostile}, "judge": {},
        "verdict": hostile, "piece": None,
    }  # fmt: skip
    read_page(page([report]))


def test_colours_go_from_pale_to_dark():
    assert colour(1e-12) == colour(1e-8)
    assert colour(1.0) == colour(5.0) == colour(None) == colour(float("inf"))
    shades = [int(colour(10.0**n)[1:3], 16) for n in range(-8, 1)]
    assert shades == sorted(shades, reverse=True)
    assert len(set(shades)) == 9
