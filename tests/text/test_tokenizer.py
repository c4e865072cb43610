"""Tokenizers against llama.cpp's ids, against a slow oracle, and on broken metadata."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pnrt.container.gguf import open_gguf
from pnrt.errors import ModelError, PnrtError
from pnrt.text.merging import ALPHABET, PRE
from pnrt.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "tokenizers"
NAMES = ("default", "gpt-2", "llama-bpe", "qwen2", "qwen35", "smollm", "spm")
# strings in which llama.cpp's detokenizer removes spaces; the streaming rule keeps every byte
CLEANED = {"default": 4, "gpt-2": 4, "llama-bpe": 4}


def metadata_of(path):
    with open_gguf(path) as file:
        return {
            key: list(value) if hasattr(value, "__len__") and not isinstance(value, str) else value
            for key, value in file.metadata.items()
            if key.startswith("tokenizer.")
        }


def cases_of(name):
    return json.loads((GOLDEN / name).read_text())["cases"]


def smollm2_path():
    """The real model: named by PNRT_SMOLLM2, else where `pnrt demo` keeps it."""
    if path := os.environ.get("PNRT_SMOLLM2"):
        return Path(path)
    from pnrt.demo import cached_model

    return cached_model() or pytest.skip("SmolLM2 is not cached: run `pnrt demo` once")


def check_goldens(tokenizer, cases, cleaned=0):
    different = 0
    for case in cases:
        text = case["text"]
        assert tokenizer.encode(text, add_bos=False) == case["ids"], text
        ids = tokenizer.encode(text, parse_special=True, add_bos=False)
        assert ids == case["ids_special"], text
        assert tokenizer.encode(text, parse_special=True) == case["ids_bos_special"], text
        plain, special = tokenizer.decode(case["ids"]), tokenizer.decode(ids, special=True)
        expected = [bytes.fromhex(case[key]).decode() for key in ("detok_hex", "detok_special_hex")]
        if [plain, special] != expected:
            different += 1
            assert plain == special == text
        stream = tokenizer.stream()
        streamed = "".join(map(stream.push, case["ids"])) + stream.flush()
        assert streamed == (" " + plain if tokenizer.pre is None and text else plain)
    assert different == cleaned


@pytest.mark.parametrize("name", NAMES)
def test_golden_ids_and_texts(name):
    metadata = metadata_of(GOLDEN / f"vocab-{name}.gguf")
    tokenizer = Tokenizer.from_metadata(metadata)
    cases = cases_of(f"tiny-{name}.json")
    assert len(cases) == 100
    check_goldens(tokenizer, cases, CLEANED.get(name, 0))


def test_golden_smollm2():
    with open_gguf(smollm2_path()) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    check_goldens(tokenizer, cases_of("smollm2.json"))
    assert (tokenizer.bos, tokenizer.eos, tokenizer.add_bos) == (1, 2, False)
    assert {tokenizer.token(i) for i in tokenizer.eog} >= {"<|im_end|>", "<|endoftext|>"}
    chat = json.loads((GOLDEN / "smollm2-chat.json").read_text())
    for case in chat["cases"]:
        text = case["rendered_add_generation_prompt"]
        ids = tokenizer.encode(text, parse_special=True, add_bos=False)
        assert ids == case["ids_add_generation_prompt"]


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("default", "spm")])
@settings(max_examples=60)
@given(text=st.text(max_size=40))
def test_bpe_is_lossless(name, text):
    tokenizer = built(name)
    assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == text
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids[tokenizer.add_bos :])) == text.encode()


_BUILT = {}


def built(name):
    if name not in _BUILT:
        _BUILT[name] = Tokenizer.from_metadata(metadata_of(GOLDEN / f"vocab-{name}.gguf"))
    return _BUILT[name]


def slow_spm(metadata, text):
    """The SentencePiece rule word for word: best score first, leftmost on ties."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {token: i for i, token in enumerate(tokens)}
    parts = list("\u2581" + text.replace(" ", "\u2581"))
    while True:
        joined = [parts[i] + parts[i + 1] for i in range(len(parts) - 1)]
        known = [i for i, both in enumerate(joined) if both in ids]
        if not known:
            break
        best = max(known, key=lambda i: (scores[ids[joined[i]]], -i))
        parts[best : best + 2] = [joined[best]]
    out = []
    for part in parts:
        out += [ids[part]] if part in ids else [ids[f"<0x{b:02X}>"] for b in part.encode()]
    return out


SPM = metadata_of(GOLDEN / "vocab-spm.gguf")
PIECES = [t.replace("\u2581", " ") for t in SPM["tokenizer.ggml.tokens"][259:] if "<" not in t]


@settings(max_examples=150)
@given(parts=st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=8))
def test_spm_follows_the_rule(parts):
    # the markers of the vocabulary are user-defined tokens and not part of this rule
    text = "".join(parts).replace("<", "").replace("|", "")
    expected = slow_spm(SPM, text) if text else []
    assert built("spm").encode(text, add_bos=False) == expected
    assert built("spm").decode(expected) == text.replace("\u2581", " ")


@settings(max_examples=100)
@given(
    words=st.sets(st.text("abc", min_size=2, max_size=5), max_size=30),
    scores=st.lists(st.integers(-3, 0), min_size=30, max_size=30),
    text=st.text("abcé ", max_size=25),
)
def test_spm_with_equal_scores(words, scores, text):
    tokens = [f"<0x{b:02X}>" for b in range(256)] + ["\u2581", "a", "b", *sorted(words)]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [6] * 256 + [1] * (len(tokens) - 256),
        "tokenizer.ggml.scores": [0.0] * 259 + list(map(float, scores[: len(words)])),
    }
    expected = slow_spm(metadata, text) if text else []
    assert Tokenizer.from_metadata(metadata).encode(text, add_bos=False) == expected


def tiny(**changes):
    """Metadata of a byte-level vocabulary: the alphabet, two merges, four special tokens."""
    tokens = [*ALPHABET, "ab", "abc", "<|x|>", "</s>", "<u>", "<|x|><|y|>"]
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1] * 258 + [3, 1, 4, 3],
        "merges": ["a b", "ab c"],
        "bos_token_id": 258,
        "eos_token_id": 258,
    } | changes
    return {f"tokenizer.ggml.{k}": v for k, v in metadata.items() if v is not None}


def test_special_tokens():
    t = Tokenizer.from_metadata(tiny())
    # "</s>" is typed normal in the file; its text makes it control and an end
    assert t.kind(259) == "control"
    assert t.eog == {258, 259}
    assert t.encode("abc</s>", parse_special=True) == [257, 259]
    assert 259 not in t.encode("abc</s>")
    # user-defined tokens are always found, control ones on request, the longest first
    assert t.encode("<u>") == [260]
    assert t.encode("ab<|x|>", parse_special=True) == [256, 258]
    assert t.encode("<|x|><|x|><|y|>ab", parse_special=True) == [258, 261, 256]
    assert t.encode("ab", add_bos=True) == [258, 256]
    assert t.decode([258, 256, 260]) == "ab<u>"
    assert t.decode([258, 256, 260], special=True) == "<|x|>ab<u>"
    assert t.token_bytes(258) == b"<|x|>"
    assert t.token(256) == "ab"


def test_longest_special_text_wins_over_the_leftmost():
    tokens = [*ALPHABET, "<ab", "b<cd>"]
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    t = Tokenizer.from_metadata(
        tiny(tokens=tokens, token_type=[1] * 256 + [4, 4], merges=[], **ids)
    )
    assert t.encode("<ab<cd>") == [*t.encode("<a"), 257]


def test_defaults():
    t = Tokenizer.from_metadata(tiny(bos_token_id=None, eos_token_id=None, token_type=None))
    assert (t.bos, t.eos, t.add_bos, t.kind(258)) == (11, 11, False, "normal")
    assert Tokenizer.from_metadata(tiny(pre="llama3")).add_bos
    assert not Tokenizer.from_metadata(tiny(pre="llama3", add_bos_token=False)).add_bos
    assert built("spm").add_bos


@pytest.mark.parametrize(("pre", "found"), [(None, "missing"), ("default", "'default'")])
def test_a_pre_that_nobody_chose_is_said(pre, found, caplog):
    assert Tokenizer.from_metadata(tiny(pre=pre)).pre == "default"
    assert f"tokenizer.ggml.pre is {found}" in caplog.text


def test_ignore_merges_belongs_to_llama_bpe():
    changes = {"tokens": [*ALPHABET, "xyz"], "token_type": None, "merges": []}
    changes |= {"bos_token_id": 0, "eos_token_id": 0}
    assert Tokenizer.from_metadata(tiny(pre="llama-bpe", **changes)).encode("xyz")[1:] == [256]
    assert len(Tokenizer.from_metadata(tiny(pre="qwen2", **changes)).encode("xyz")) == 3


def test_byte_outside_the_vocabulary_blocks_merges():
    tokens = [char for char in tiny()["tokenizer.ggml.tokens"] if char != ALPHABET[4]]
    t = Tokenizer.from_metadata(tiny(tokens=tokens, token_type=None))
    a, b = t.encode("a")[0], t.encode("b")[0]
    assert t.encode("a\x04b") == [a, b]
    assert max(t.encode("\x04ab\x04")) < t.vocab_size


def test_stream_never_splits_a_code_point():
    t = Tokenizer.from_metadata(tiny())
    stream = t.stream()
    ids = t.encode("é👩x")
    texts = [stream.push(i) for i in ids]
    assert texts == ["", "é", "", "", "", "👩", "x"]
    assert stream.push(ids[0]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.push(ids[-1]) + stream.flush() == "x"
    # a broken start is replaced as soon as the next byte shows it
    assert stream.push(ids[0]) + stream.push(ids[-1]) == "\ufffdx"
    assert stream.push(258) == ""
    assert t.stream(special=True).push(258) == "<|x|>"


def test_spm_stream_keeps_the_leading_space():
    t = built("spm")
    ids = t.encode("Hello world", add_bos=False)
    stream = t.stream()
    assert "".join(map(stream.push, ids)) == " Hello world"
    assert t.decode([t.bos, *ids]) == "Hello world"


BROKEN = {
    "no model": ({"model": None}, "model: missing"),
    "other model": ({"model": "bert"}, "model: 'bert'"),
    "model is a number": ({"model": 3}, "model: a int"),
    "unknown pre": ({"pre": "klingon"}, "pre: 'klingon'"),
    "no tokens": ({"tokens": None}, "tokens: missing"),
    "empty tokens": ({"tokens": []}, "tokens: no tokens"),
    "tokens is a string": ({"tokens": "abc"}, "tokens: a str"),
    "tokens of numbers": ({"tokens": [1, 2]}, "tokens: element 0 is a int"),
    "token twice": ({"tokens": [*ALPHABET, "ab", "ab"]}, "'ab' is both token 256 and token 257"),
    "short types": ({"token_type": [1]}, "token_type: 1 elements"),
    "unknown type": ({"token_type": [9] * 262}, "token 0 is of type 9"),
    "types are text": ({"token_type": ["1"] * 262}, "element 0 is a str"),
    "byte that is none": ({"token_type": [6] * 262}, "token 0 is a byte and reads"),
    "no merges": ({"merges": None}, "merges: missing"),
    "merge without space": ({"merges": ["a b", "abc"]}, "merge 1 is 'abc'"),
    "merge of no token": ({"merges": ["a q"]}, "merges: "),
    "bos outside": ({"bos_token_id": 262}, "bos_token_id: id 262"),
    "eos outside": ({"eos_token_id": -1}, "eos_token_id: id -1"),
    "eot outside": ({"eot_token_id": 999}, "eot_token_id: id 999"),
    "bos is a bool": ({"bos_token_id": True}, "bos_token_id: a bool"),
    "bos is text": ({"bos_token_id": "1"}, "bos_token_id: a str"),
    "add_bos is a number": ({"add_bos_token": 1}, "add_bos_token: a int"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_metadata(name):
    changes, found = BROKEN[name]
    with pytest.raises(ModelError) as error:
        Tokenizer.from_metadata(tiny(**changes))
    check_message(str(error.value), found)


@pytest.mark.parametrize(
    ("scores", "found"),
    [
        (None, "scores: missing"),
        ([0.0], "scores: 1 elements"),
        ([float("nan")] * len(SPM["tokenizer.ggml.tokens"]), "scores: NaN"),
    ],
)
def test_broken_scores(scores, found):
    with pytest.raises(ModelError) as error:
        Tokenizer.from_metadata(SPM | {"tokenizer.ggml.scores": scores})
    check_message(str(error.value), found)


def check_message(message, found):
    """Where and what was found; what is allowed; what to do."""
    assert message.startswith("tokenizer.ggml.")
    assert found in message
    assert "; allowed is " in message
    assert message.endswith(".")


def test_bad_arguments():
    t = Tokenizer.from_metadata(tiny())
    for id in (-1, 262, 10**9):
        for use in (t.token, t.kind, t.token_bytes, t.stream().push, lambda i: t.decode([i])):
            with pytest.raises(ModelError, match=f"token {id}: not in the vocabulary"):
                use(id)
    with pytest.raises(PnrtError, match="lone surrogate"):
        t.encode("a\ud800")
    with pytest.raises(PnrtError, match="unknown pre-tokenizer"):
        Tokenizer.from_metadata(tiny(), pre="klingon")
    few = tiny(tokens=["a", "b", "ab"], token_type=None, merges=["a b"])
    few |= {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.eos_token_id": None}
    with pytest.raises(ModelError, match="bos_token_id: missing"):
        Tokenizer.from_metadata(few).encode("ab", add_bos=True)


def test_an_unused_padding_token_is_no_reason_to_refuse(caplog):
    assert Tokenizer.from_metadata(tiny(padding_token_id=999)).vocab_size == 262
    assert "padding_token_id is no token: 999" in caplog.text


def test_pre_can_be_chosen():
    assert Tokenizer.from_metadata(tiny(pre=None), pre="llama3").pre == "llama-bpe"
    assert Tokenizer.from_metadata(tiny(pre="klingon"), pre="default").pre == "default"
    assert set(PRE) == set(NAMES) - {"spm"}


def test_import_is_light():
    code = "import sys, pnrt.text.tokenizer as t; print('tokenizers' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
