"""The GGUF reader: what it reads, and each way a file can be wrong.

The names under "malformed" follow the 28 classes of llama.cpp's tests/test-gguf.cpp, one test each
(and the class it had to switch off, a value larger than memory).
"""

import struct

import gguf as peer
import numpy as np
import pytest

from pnrt.container import values
from pnrt.container.gguf import open_gguf
from pnrt.errors import FileError, FormatError, PnrtError
from pnrt.formats import FORMATS
from tests.builders import entry, gguf, info, string, tiny, value

F32, Q8_0, PN3T = 0, 8, 124


@pytest.fixture
def refused(tmp_path):
    """refused(bytes, *words): opening fails with a four-part message that holds the words."""

    def check(data: bytes, *words: str, extra_types=None, name="m.gguf"):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(PnrtError) as caught:
            open_gguf(path, extra_types=extra_types)
        four_parts(str(caught.value), path, *words)
        return str(caught.value)

    return check


def four_parts(message: str, path, *words: str):
    """where: found; allowed. what to do."""
    where, _, rest = message.partition(": ")
    assert str(path) in where
    found, _, rest = rest.partition("; ")
    allowed, _, todo = rest.partition(". ")
    assert found
    assert allowed
    assert todo.endswith("."), message
    for word in words:
        assert word in message, message


def one(shape=(2, 32), type_id=F32, offset=0, nbytes=256, entries=(), **kwargs) -> bytes:
    """A file with one tensor `t`."""
    return gguf(list(entries), [info("t", shape, type_id, offset)], bytes(nbytes), **kwargs)


def two(first, second, data: bytes, **kwargs) -> bytes:
    return gguf([], [info("a", *first), info("b", *second)], data, **kwargs)


# what is read


KINDS = [
    ("uint8", 255),
    ("int8", -128),
    ("uint16", 65535),
    ("int16", -32768),
    ("uint32", 2**32 - 1),
    ("int32", -(2**31)),
    ("float32", 0.5),
    ("bool", True),
    ("string", "naïve 🙂"),
    ("uint64", 2**64 - 1),
    ("int64", -(2**63)),
    ("float64", 1e300),
]


@pytest.mark.parametrize("version", [2, 3])
def test_reads_every_value_type(tmp_path, version):
    entries = [entry(f"k.{kind}", kind, item) for kind, item in KINDS]
    entries += [entry(f"a.{kind}", f"array[{kind}]", [item, item]) for kind, item in KINDS]
    entries += [entry("empty", "array[string]", [])]
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(entries, version=version))
    with open_gguf(path) as file:
        assert file.version == version
        for kind, item in KINDS:
            assert file.metadata[f"k.{kind}"] == item
            assert type(file.metadata[f"k.{kind}"]) is type(item)
            assert file.metadata_type(f"k.{kind}") == kind
            assert file.metadata[f"a.{kind}"] == [item, item]
            assert type(file.metadata[f"a.{kind}"][0]) is type(item)
            assert file.metadata_type(f"a.{kind}") == f"array[{kind}]"
        assert list(file.metadata["empty"]) == []
        assert file.metadata.get("absent", 7) == 7
        assert file.metadata["a.float32"].numpy().dtype == np.float32
        assert file.metadata["a.string"][-1:] == ["naïve 🙂"]
        with pytest.raises(FileError, match="strings; numbers"):
            file.metadata["a.string"].numpy()


def test_shapes_offsets_and_rows(tmp_path):
    data = bytes(range(256)) * 3
    path = tmp_path / "m.gguf"
    infos = [info("m", (2, 32), F32, 0), info("q", (3, 2, 32), Q8_0, 256), info("v", (8,), 1, 480)]
    path.write_bytes(gguf([], infos, data[:496]))
    with open_gguf(path) as file:
        m, q, v = file.tensors.values()
        assert list(file.tensors) == ["m", "q", "v"]
        assert (m.shape, m.rows, m.columns, m.nbytes) == ((2, 32), 2, 32, 256)
        assert (q.shape, q.rows, q.columns, q.nbytes) == ((3, 2, 32), 6, 32, 204)
        assert (v.shape, v.rows, v.columns, v.nbytes) == ((8,), 1, 8, 16)
        assert m.offset == file.data_start
        assert file.rows("m").tobytes() == data[:256]
        assert file.rows("q").shape == (6, 34)
        assert file.rows("v").tobytes() == data[480:496]
        assert not file.rows("q").flags.writeable
        file.drop_pages("m")
        kept = file.rows("m")
    assert kept.tobytes() == data[:256]
    with pytest.raises(FileError) as caught:
        file.rows("m")
    four_parts(str(caught.value), path, "closed")


def test_no_such_tensor(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(one())
    with open_gguf(path) as file, pytest.raises(FileError) as caught:
        file.rows("tt")
    four_parts(str(caught.value), path, "no tensor 'tt'", "near ones are t")


def test_peer_writes_we_read(tmp_path):
    path = tmp_path / "m.gguf"
    rng = np.random.default_rng(1)
    weights = rng.standard_normal((4, 64)).astype(np.float32)
    writer = peer.GGUFWriter(path, "llama")
    writer.add_uint32("x.count", 3)
    writer.add_float32("x.eps", 1e-5)
    writer.add_array("x.words", ["a", "bé", ""])
    writer.add_array("x.numbers", [1, 2, 3])
    for kind in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"):
        kind = peer.GGMLQuantizationType[kind]
        rows = peer.quants.quantize(weights, kind)
        writer.add_tensor(f"w.{kind.name}", rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_gguf(path) as file:
        assert file.metadata["general.architecture"] == "llama"
        assert file.metadata["x.words"] == ["a", "bé", ""]
        assert file.metadata["x.numbers"] == [1, 2, 3]
        assert len(file.tensors) == 6
        assert file.notes == []
        for name, tensor in file.tensors.items():
            kind = peer.GGMLQuantizationType(tensor.type_id)
            assert tensor.shape == (4, 64)
            assert tensor.format.name == kind.name.lower()
            assert file.rows(name).tobytes() == peer.quants.quantize(weights, kind).tobytes()


def test_every_format_with_an_id_is_read(tmp_path):
    formats = [each for each in FORMATS.values() if each.type_id is not None]
    assert {"pn3t", "pn4t", "q8_0"} <= {each.name for each in formats}
    rng = np.random.default_rng(2)
    tensors = {}
    for each in formats:
        raw = rng.integers(0, 256, (3, 2 * each.nbytes), np.uint8)
        tensors[each.name] = (each.type_id, (3, 2 * each.block), raw)
    with open_gguf(tiny(tmp_path / "m.gguf", [], tensors)) as file:
        for name, (_, shape, raw) in tensors.items():
            assert file.tensors[name].format is FORMATS[name]
            assert file.tensors[name].shape == shape
            assert np.array_equal(file.rows(name), raw)


def test_string_arrays_are_lazy(tmp_path, monkeypatch):
    count = 250_000
    words = [f"token{i}" for i in range(count)]
    # lengths beyond one byte take the careful path, at a chunk's edge and inside one
    words[4095] = words[4096] = words[9999] = "x" * 300
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf([entry("tokens", "array[string]", words)]))
    decoded = []
    original = values.Cursor.decode

    def counting(self, start, n, what):
        decoded.append(what)
        return original(self, start, n, what)

    monkeypatch.setattr(values.Cursor, "decode", counting)
    with open_gguf(path) as file:
        tokens = file.metadata["tokens"]
        assert len(tokens) == count
        assert decoded == ["key"]
        assert (tokens[0], tokens[-1], tokens[9999]) == (words[0], words[-1], words[9999])
        assert len(decoded) == 4
        assert list(tokens) == words
        assert len(decoded) == 4
        with pytest.raises(IndexError):
            tokens[count]


def test_text_that_is_not_utf8_in_an_array_is_told_when_read(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(
        gguf([string("k") + struct.pack("<IIQ", 9, 8, 2) + string("ok") + string(b"a\xff")])
    )
    with open_gguf(path) as file:
        assert file.metadata["k"][0] == "ok"
        for read in (lambda: file.metadata["k"][1], file.metadata["k"].tolist):
            with pytest.raises(FileError) as caught:
                read()
            four_parts(str(caught.value), path, "0xff", "UTF-8")


# unknown types and ids that must prove themselves


def test_unknown_type_ids_survive(tmp_path):
    path = tmp_path / "m.gguf"
    infos = [info("a", (2, 32), 153, 0), info("b", (4, 32), F32, 96), info("c", (1, 256), 16, 608)]
    path.write_bytes(gguf([], infos, bytes(608 + 66)))
    with open_gguf(path) as file:
        a, b, c = file.tensors.values()
        assert (a.format, a.nbytes, a.extent, a.type_name) == (None, 96, 96, "id 153")
        assert (b.type_name, b.nbytes) == ("f32", 512)
        assert (c.format, c.nbytes, c.type_name) == (None, 66, "id 16 (iq2_xxs)")
        assert file.data("a").nbytes == 96
        with pytest.raises(FormatError) as caught:
            file.rows("a")
        four_parts(str(caught.value), path, "type id 153", "pn3t")


def test_id_42_is_not_guessed(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(two(((4, 64), 42, 0), ((32,), F32, 288), bytes(288 + 128)))
    with open_gguf(path) as file:
        # 4 x 64 weights in 272 bytes and padding: an 8.5-bit format, not ggml's q2_0 (72 bytes)
        assert file.tensors["a"].format is None
        assert file.tensors["a"].type_name == "id 42"
        with pytest.raises(FormatError) as caught:
            file.rows("a")
        four_parts(str(caught.value), path, "type id 42", "e4m3", "q8_0", "extra_types={42:")
        assert '{42: "e4m3"} (--e4m3-id 42)' in str(caught.value)
        assert "means q2_0 by this id, which takes 72 bytes" in str(caught.value)
    with open_gguf(path, extra_types={42: "e4m3"}) as file:
        assert file.tensors["a"].format is FORMATS["e4m3"]
        assert file.rows("a").shape == (4, 68)
    path.write_bytes(two(((4, 64), 42, 0), ((32,), F32, 96), bytes(96 + 128)))
    with open_gguf(path) as file:
        assert file.tensors["a"].type_name == "id 42 (q2_0)"


def test_mapped_id_that_does_not_fit(refused):
    data = two(((4, 64), 42, 0), ((32,), F32, 96), bytes(96 + 128))
    refused(data, "a", "needs 272 bytes as e4m3", "96 bytes later", extra_types={42: "e4m3"})


def test_a_cut_stock_tensor_is_truncated_not_misnamed(refused):
    # 33 bytes are a whole mxfp8 row, but id 8 means q8_0 everywhere
    message = refused(one((1, 32), 8, nbytes=33), "1 bytes are missing", "fetch it again")
    assert "would fit" not in message


def test_unknown_format_name_in_extra_types(tmp_path):
    (tmp_path / "m.gguf").write_bytes(one())
    with pytest.raises(FormatError, match="q9_9"):
        open_gguf(tmp_path / "m.gguf", extra_types={42: "q9_9"})


def test_pn_id_with_too_few_bytes(refused):
    data = two(((4, 160), PN3T, 0), ((32,), F32, 256), bytes(256 + 128))
    refused(data, "tensor a", "272 bytes as pn3t", "b begins 256 bytes later")


def test_pn_id_whose_bytes_fit_another_format(refused):
    # 4 x 320 weights at 8.5 bits: somebody else's format under PN's id
    message = refused(
        two(((4, 320), PN3T, 0), ((32,), F32, 1376), bytes(1376 + 128)),
        "needs 544 bytes as pn3t",
        "1376 bytes lie before",
        "q8_0",
    )
    assert "may mean another format" in message
    refused(one((4, 320), PN3T, nbytes=1360), "needs 544 bytes as pn3t", "end of the file", "q8_0")


def test_pn_row_that_does_not_divide(refused):
    refused(one((4, 96), PN3T, nbytes=544), "rows of 96 weights", "pn3t", "multiples of 80")


def test_gap_and_tail_are_notes(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(two(((8,), F32, 0), ((8,), F32, 128), bytes(128 + 1000)))
    with open_gguf(path) as file:
        gap, tail = map(str, file.notes)
    four_parts(gap, path, "tensor a", "32 bytes as f32", "128 bytes lie before the next tensor, b")
    four_parts(tail, path, "tensor b", "1000 bytes lie before the end of the file")


def test_pn_tail_is_a_note(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(one((4, 160), PN3T, nbytes=272 + 999))
    with open_gguf(path) as file:
        assert len(file.notes) == 1
        assert file.rows("t").shape == (4, 68)


def test_overlap(refused):
    data = two(((32,), F32, 0), ((32,), F32, 64), bytes(256))
    refused(data, "tensor a", "needs 128 bytes as f32", "b begins 64 bytes later")
    refused(two(((32,), F32, 0), ((32,), F32, 0), bytes(256)), "b begins 0 bytes later")
    # a stock type pnrt does not decode is measured too (iq2_xxs: 66 bytes per 256)
    refused(two(((2, 256), 16, 0), ((32,), F32, 64), bytes(256)), "needs 132 bytes")


def test_offsets_need_not_be_in_file_order(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(two(((8,), F32, 32), ((8,), F32, 0), bytes(range(64))))
    with open_gguf(path) as file:
        assert list(file.tensors) == ["a", "b"]
        assert file.rows("a").tobytes() == bytes(range(32, 64))


def test_scalar_tensor(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(one((), F32, nbytes=4))
    with open_gguf(path) as file:
        assert (file.tensors["t"].shape, file.tensors["t"].nbytes) == ((), 4)
        assert file.rows("t").shape == (1, 4)


# not a GGUF file at all


def test_empty_file(refused):
    refused(b"", "is empty")


def test_garbage(refused):
    refused(bytes(range(200)), "starts with b'\\x00\\x01\\x02\\x03'")
    refused(b"GG", "starts with b'GG'")


@pytest.mark.parametrize("length", [4, 7, 8, 15, 20, 23])
def test_truncated_header(refused, length):
    refused(gguf()[:length], "the end of the file", "truncated")


def test_directory(tmp_path):
    with pytest.raises(FileError) as caught:
        open_gguf(tmp_path)
    four_parts(str(caught.value), tmp_path, "is a directory")


def test_absent(tmp_path):
    with pytest.raises(FileError) as caught:
        open_gguf(tmp_path / "absent.gguf")
    four_parts(str(caught.value), tmp_path, "No such file")


def test_safetensors(refused):
    head = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    refused(struct.pack("<Q", len(head)) + head + bytes(4), "safetensors", "Convert")


@pytest.mark.parametrize(
    ("head", "word"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "Git LFS"),
        (b"PK\x03\x04" + bytes(60), "PyTorch"),
        (b"tjgg" + bytes(60), "before GGUF"),
    ],
)
def test_other_known_files(refused, head, word):
    refused(head, word)


@pytest.mark.parametrize("version", [2, 3])
def test_big_endian(refused, version):
    refused(b"GGUF" + struct.pack(">IQQ", version, 0, 0) + bytes(8), "big-endian", "Convert")


# malformed: header


def test_header_bad_magic(refused):
    refused(gguf(magic=b"FUGG"), "b'FUGG'")


def test_header_bad_version_0(refused):
    refused(gguf(version=0), "version", "is 0", "2 and 3")


def test_header_bad_version_1(refused):
    refused(gguf(version=1), "is 1", "2 and 3", "Convert")


def test_header_bad_version_future(refused):
    refused(gguf(version=4), "is 4", "newer")


def test_header_bad_n_tensors(refused):
    refused(gguf(n_tensors=2**64 - 1), "number of tensors", "18446744073709551615", "at most 0")


def test_header_bad_n_kv(refused):
    refused(gguf(n_keys=2**64 - 1), "number of keys", "18446744073709551615", "at most 0")


# malformed: keys


def test_kv_bad_key_size(refused):
    bad = struct.pack("<Q", 2**64 - 1) + b"key" + value("uint32", 1)
    refused(gguf([bad]), "length of key", "18446744073709551615", "at most")


def test_kv_key_longer_than_the_limit(refused):
    refused(gguf([entry("k" * 65536, "uint8", 1)]), "length of key", "the limit is 65535")


def test_kv_empty_key(refused):
    refused(gguf([entry("", "uint32", 1)]), "key", "is empty")


def test_kv_bad_type(refused):
    refused(gguf([string("k") + struct.pack("<II", 13, 0)]), "type of key k", "is 13", "0 to 12")


def test_kv_bad_array_type(refused):
    bad = string("k") + struct.pack("<IIQ", 9, 13, 0)
    refused(gguf([bad]), "element type of key k", "is 13", "0 to 12")


def test_kv_bad_value_size(refused):
    bad = string("k") + struct.pack("<IQ", 8, 2**40)
    refused(gguf([bad]), "length of value of key k", "1099511627776", "at most")


def test_kv_bad_array_size(refused):
    bad = string("k") + struct.pack("<IIQ", 9, 4, 2**62)
    refused(gguf([bad], data=bytes(64)), "number of elements of key k", str(2**62), "at most")
    bad = string("k") + struct.pack("<IIQ", 9, 8, 2**62)
    refused(gguf([bad], data=bytes(64)), "number of elements of key k", str(2**62), "at most")


@pytest.mark.parametrize("length", [200, 2**32, 2**64 - 1])
def test_kv_array_string_outside_the_file(refused, length):
    bad = string("k") + struct.pack("<IIQ", 9, 8, 2) + string("ok") + struct.pack("<Q", length)
    refused(gguf([bad]), "element of key k", f"needs {length} bytes")


def test_kv_nested_array(refused):
    bad = string("k") + struct.pack("<IIQ", 9, 9, 1) + value("array[uint8]", [1])[4:]
    refused(gguf([bad]), "element type of key k", "is array", "flat")


def test_kv_bad_bool(refused):
    refused(gguf([string("k") + struct.pack("<IB", 7, 2)]), "bool value of key k", "is 2")
    bad = string("k") + struct.pack("<IIQBB", 9, 7, 2, 1, 255)
    refused(gguf([bad]), "bool value of key k", "is 255", "0 and 1")


def test_kv_not_utf8(refused):
    refused(gguf([entry("k", "string", b"ab\xff")]), "value of key k", "0xff", "UTF-8")
    refused(gguf([string(b"\xc0k") + value("uint8", 1)]), "key", "0xc0", "UTF-8")


def test_kv_duplicate_key(refused):
    refused(gguf([entry("k", "uint32", 1), entry("k", "uint32", 2)]), "key k", "occurs twice")


@pytest.mark.parametrize("alignment", [0, 13, 48])
def test_kv_bad_align(refused, alignment):
    bad = [entry("general.alignment", "uint32", alignment)]
    refused(gguf(bad), "general.alignment", f"is {alignment}", "power of two")


@pytest.mark.parametrize("kind", ["int32", "uint64", "string", "array[uint32]"])
def test_kv_wrong_type_align(refused, kind):
    item = {"string": "32", "array[uint32]": [32]}.get(kind, 32)
    refused(gguf([entry("general.alignment", kind, item)]), f"has type {kind}", "must be uint32")


# malformed: tensor list


def test_tensors_bad_name_size(refused):
    refused(gguf([], [info("n" * 64, (8,), F32, 0)], bytes(32)), "name has 64 bytes", "1 to 63")
    refused(gguf([], [info("", (8,), F32, 0)], bytes(32)), "name has 0 bytes", "1 to 63")
    bad = struct.pack("<Q", 2**63) + bytes(32)
    refused(gguf([], [bad]), "length of tensor name", str(2**63))


def test_tensors_bad_n_dims(refused):
    refused(gguf([], [info("t", (1, 1, 1, 1, 8), F32, 0)], bytes(32)), "5 dimensions", "at most 4")
    refused(one((8,), nbytes=32)[:-40], "end of the file")
    refused(gguf([], [info("t", (8,), F32, 0, n_dims=2**32 - 1)], bytes(32)), "4294967295")


def test_tensors_bad_shape(refused):
    refused(one((2**64 - 1,)), "t", "fewer than 2^63")


def test_tensors_zero_dim(refused):
    refused(one((0, 32)), "tensor t", "shape [0, 32] has a zero")


def test_tensors_ne_too_big(refused):
    big = 4 * (2**31 - 1)
    refused(one((big, big)), str(big * big), "fewer than 2^63")


def test_tensors_nbytes_too_big(refused):
    # the byte count exceeds 2^64 although the element count does not
    big = 1_600_000_000
    refused(one((big, big)), f"{4 * big * big - 256} bytes are missing", "truncated")
    refused(one((big, big), 27), f"{8 * big * big - 256} bytes are missing")
    refused(one((big, big), 153), "weights per byte")


def test_tensors_nbytes_pad_wrap(refused):
    # 2^64 - 16 bytes: padding to 32 wraps to zero in 64-bit arithmetic
    shape = (2**30 + 1, 2**30 - 1, 4)
    refused(one(shape), f"{2**64 - 16 - 256} bytes are missing")


def test_tensors_bad_type(tmp_path):
    # not an error here: a type nobody knows is listed, and cannot be read as weights
    path = tmp_path / "m.gguf"
    path.write_bytes(one(type_id=2**32 - 1))
    with open_gguf(path) as file:
        assert file.tensors["t"].format is None
        with pytest.raises(FormatError) as caught:
            file.rows("t")
        four_parts(str(caught.value), path, "type id 4294967295")


def test_tensors_bad_offset(refused):
    refused(one(offset=2**64 - 1), "offset 18446744073709551615 is not aligned")
    refused(one(offset=2**64 - 32), f"{2**64 - 32} bytes are missing")


def test_tensors_duplicate_name(refused):
    data = gguf([], [info("t", (8,), F32, 0), info("t", (8,), F32, 32)], bytes(64))
    refused(data, "tensor t", "occurs twice")


def test_tensors_bad_align(refused):
    bad = [entry("general.alignment", "uint32", 13)]
    refused(one(entries=bad, alignment=13), "general.alignment", "is 13")


def test_tensors_inconsistent_align(refused):
    data = two(((3,), F32, 0), ((3,), F32, 12), bytes(24))
    refused(data, "tensor b", "offset 12", "multiples of 32")


def test_tensors_custom_align(tmp_path):
    path = tmp_path / "m.gguf"
    stated = [entry("general.alignment", "uint32", 1)]
    infos = [info("a", (3,), F32, 0), info("b", (3,), F32, 12)]
    path.write_bytes(gguf(stated, infos, bytes(range(24)), alignment=1))
    with open_gguf(path) as file:
        assert file.alignment == 1
        assert file.rows("b").tobytes() == bytes(range(12, 24))


# malformed: data


def test_data_not_enough_data(refused):
    refused(one(nbytes=255), "tensor t", "takes bytes", "1 bytes are missing", "truncated")


def test_data_missing_bytes_are_counted_over_all_tensors(refused):
    data = two(((32,), F32, 0), ((64,), F32, 128), bytes(100))
    refused(data, "tensor a", f"{128 + 256 - 100} bytes are missing in all")


def test_data_bad_align(refused):
    bad = [entry("general.alignment", "uint32", 13)]
    refused(one(entries=bad, alignment=13, nbytes=512), "general.alignment", "is 13")


def test_data_inconsistent_align(refused):
    # the writer packed to 1 byte, the reader must assume 32
    data = two(((5,), F32, 0), ((5,), F32, 20), bytes(40), alignment=1)
    refused(data, "tensor b", "offset 20", "multiples of 32")


def test_data_mem_size_overflow(refused):
    big = 0x7FFFFFFFFFFFFFC0
    data = two(((big,), 24, 0), ((big,), 24, big), bytes(32))
    refused(data, f"{2 * big - 32} bytes are missing")


def test_random_damage_never_escapes(tmp_path):
    """Each byte of a small file set to several values: opened, or refused in one sentence."""
    good = gguf(
        [entry("k", "array[string]", ["a", "bc"]), entry("n", "array[bool]", [True])],
        [info("t", (2, 80), PN3T, 0), info("u", (8,), F32, 96)],
        bytes(128),
    )
    path = tmp_path / "m.gguf"
    opened = refused = 0
    for at in range(len(good) - 128):
        for new in (0, 1, 127, 128, 255):
            path.write_bytes(good[:at] + bytes([new]) + good[at + 1 :])
            try:
                with open_gguf(path) as file:
                    for each in file.tensors:
                        file.data(each)
                    [list(v) for v in file.metadata.values() if isinstance(v, values.ArrayValue)]
                    opened += 1
            except PnrtError as error:
                four_parts(str(error), path)
                refused += 1
    assert opened > 100
    assert refused > 100


def test_problems_are_collected_when_asked(tmp_path):
    path = tmp_path / "m.gguf"
    entries = [entry("k", "uint8", 1), entry("k", "uint8", 2), entry("", "uint8", 2)]
    infos = [info("a", (3,), F32, 0), info("b", (0, 3), F32, 32), info("c", (8,), F32, 12)]
    infos += [info("d", (4, 96), PN3T, 64), info("e", (99,), F32, 224)]
    path.write_bytes(gguf(entries, infos, bytes(256)))
    problems = []
    with open_gguf(path, problems=problems) as file:
        assert list(file.tensors) == ["a", "d"]
    text = "\n".join(map(str, problems))
    for words in ("occurs twice", "is empty", "has a zero", "not aligned", "of 80", "missing"):
        assert words in text
    assert len(problems) == 6
    for problem in problems:
        assert 0 <= problem.byte <= path.stat().st_size
