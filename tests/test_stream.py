"""Answers as text: stop texts, and beginnings that are not doubled."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pnrt.errors import ModelError
from pnrt.stream import Answer, prompt_tokens, until


@pytest.mark.parametrize(
    ("pieces", "stop", "written"),
    [
        (["ab", "c"], (), "abc"),
        (["ab", "c", "d"], ("bc",), "a"),
        (["a", "b", "x"], ("bc",), "abx"),
        (["aab", "ac"], ("aac", "abac"), "a"),
        (["one\n", "\n", "two"], ("\n\n",), "one"),
        (["ends with a b"], ("bc",), "ends with a b"),
        (["b", "ab", "a"], ("a", "baba"), ""),
        (["b", "ab"], ("a", "baba"), "b"),
        (["b", "ab", "b"], ("a", "baba"), "b"),
    ],
)
def test_stop_texts_are_not_written(pieces, stop, written):
    assert "".join(until(pieces, stop)) == written


@given(st.lists(st.text("ab", max_size=3)), st.lists(st.text("ab", min_size=1), max_size=3))
def test_the_cut_does_not_depend_on_the_pieces(pieces, stop):
    text = "".join(pieces)
    ends = [text.find(each) for each in stop if each in text]
    assert "".join(until(pieces, stop)) == text[: min(ends, default=len(text))]


def test_nothing_is_held_back_without_need():
    written = until(iter(["abx", "never asked for"]), ["xy", "bz"])
    assert next(written) == "ab"


class _Letters:
    """A model that writes the alphabet, a letter per token."""

    tokenizer = SimpleNamespace(
        stream=lambda: SimpleNamespace(push=lambda i: chr(97 + i), flush=lambda: "")
    )
    context, position = 100, 0

    def generate(self, tokens, n, sampler, chunk):
        for i in range(n):
            self.position = i
            yield i


def test_an_answer_ends_at_a_stop_text():
    model = _Letters()
    answer = Answer(model, [1], 26, stop=["ef"])
    assert "".join(answer) == answer.text == "abcd"
    # nothing is computed after the text was met
    assert model.position == 5
    assert len(answer.ids) == 6
    assert answer.ended == "stop"
    assert answer.seconds > 0
    whole = Answer(model, [1], 3)
    assert ("".join(whole), whole.ended) == ("abc", "limit")
    with pytest.raises(ModelError, match="empty text"):
        Answer(model, [1], 26, stop=[""])


@pytest.mark.parametrize(("text", "add"), [("<s>hi", False), ("hi<s>", None), ("", None)])
def test_a_beginning_in_the_text_is_not_put_twice(text, add):
    def encode(text, parse_special, add_bos):
        return [text, parse_special, add_bos]

    tokenizer = SimpleNamespace(bos=1, token=lambda i: "<s>", encode=encode)
    assert prompt_tokens(tokenizer, text) == [text, True, add]
    tokenizer.bos = None
    assert prompt_tokens(tokenizer, text) == [text, True, None]
