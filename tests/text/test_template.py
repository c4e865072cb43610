"""Chat templates: the golden conversations, the helpers templates expect, and the hostile ones."""

import datetime
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pnrt.errors import ModelError, PnrtError
from pnrt.text import template
from pnrt.text.template import render_chat

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "tokenizers" / "smollm2-chat.json").read_text()
)
USER = [{"role": "user", "content": "hi <é> & 'you'"}]


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"{len(case['messages'])} turns")
def test_golden_conversations(case):
    metadata = {"tokenizer.chat_template": GOLDEN["template"], "general.name": "SmolLM2"}
    text = render_chat(metadata, case["messages"])
    assert text == case["rendered_add_generation_prompt"]
    text = render_chat(GOLDEN["template"], case["messages"], add_generation_prompt=False)
    assert text == case["rendered"]


EXPECTED = {
    "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}": "<s>hi <é> & 'you'</s>",
    "{{ messages[0]|tojson }}": '{"role": "user", "content": "hi <é> & \'you\'"}',
    "{{ tools|tojson(indent=1) }}": '[\n {\n  "name": "f"\n }\n]',
    "{{ enable_thinking }}{{ missing is defined }}": "FalseFalse",
    "{{ strftime_now('%d %b %Y') }}": "02 Mar 2031",
    "{% set n = namespace(x=1) %}{% for i in [1, 2] %}{% set n.x = i %}{% endfor %}{{ n.x }}": "2",
    "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}"
    "{{ i }}{{ loop.index }}{% endfor %}": "012334",
    "{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m('a') ~ m(2) }}": "[a][2]",
    "{% generation %}{{ messages[-1]['role'] }}{% endgeneration %}": "user",
    "  {% if true %}\n  a\n  {% endif %}\nb": "  a\nb",
    "{{ messages|map(attribute='role')|join(',') }}{{ 'a-b'.split('-')[1] }}": "userb",
    "\ud83d and 日本 \U0001f469": "\ud83d and 日本 \U0001f469",
}


@pytest.mark.parametrize("source", EXPECTED)
def test_what_templates_use(source):
    text = render_chat(
        source,
        USER,
        bos_token="<s>",
        eos_token="</s>",
        tools=[{"name": "f"}],
        now=datetime.datetime(2031, 3, 2),
        enable_thinking=False,
    )
    assert text == EXPECTED[source]


def test_now_is_the_clock():
    assert render_chat("{{ strftime_now('%Y') }}", USER) == str(datetime.datetime.now().year)


GROW = "{% set n = namespace(s=START) %}{% for i in range(60) %}{% set n.s = STEP %}{% endfor %}"
DOUBLED = GROW.replace("STEP", "[n.s, n.s]").replace("START", "[1]")
HUNGRY = {
    "nested empty loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "loop in a filter": "{% for i in range(99999) %}{{ range(99999)|sum }}{% endfor %}",
    "lipsum": "{{ lipsum(n=100000000) }}",
    "big power": "{{ 10 ** (10 ** 10) }}",
    "nested list as text": DOUBLED + "{{ n.s }}",
    "nested list as json": DOUBLED + "{{ n.s|tojson }}",
    "nested list compared": DOUBLED + "{% set a = n.s %}" + DOUBLED + "{{ a == n.s }}",
    "huge multiplication": "{% set n = namespace(x=9) %}{% for i in range(99) %}"
    "{% set n.x = n.x * n.x %}{% endfor %}",
    "huge repetition": "{{ 'a' * 10**10 }}",
    "doubled text": GROW.replace("STEP", "n.s ~ n.s").replace("START", "'aaaa'")
    + "{{ n.s|length }}",
    "doubled block": "{% set s %}aaaaaaaaaa{% endset %}"
    + "{% set s %}{{ s }}{{ s }}{% endset %}" * 40,
    "wide center": "{{ 'a'|center(1000000000) }}",
    "wide format": "{{ '{:>10000000000}'.format(1) }}",
    "wide percent": "{{ '%1000000000d' % 1 }}",
    "wide join": "{{ range(99999)|join('x' * 99999) }}",
    "wide replace": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "wide batch": "{{ [1]|batch(1000000000, 'x')|list }}",
    "big range": "{% for i in range(10**9) %}{% endfor %}",
    "endless output": "{% for i in range(99999) %}{% for j in range(99999) %}"
    + "x" * 999
    + "{% endfor %}"
    "{% endfor %}",
    "macro of itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "macros of each other": "{% macro a(f) %}{{ f(f) }}{% endmacro %}{{ a(a) }}",
    "recursive loop": "{% for i in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "deep list": GROW.replace("60", "50000").replace("STEP", "[n.s]").replace("START", "1")
    + "{{ n.s }}",
}
FOUND = (
    "still running after|more than 512 MiB|more than 16,777,216 characters|calls itself without end"
    "|Range too big"
)


@pytest.mark.parametrize("name", HUNGRY)
def test_hungry_templates_stop(name, monkeypatch):
    monkeypatch.setattr(template, "SECONDS", 0.2)
    with pytest.raises(ModelError, match=FOUND) as error:
        render_chat(HUNGRY[name], USER)
    check_message(str(error.value))


def test_stops_within_the_stated_time():
    with pytest.raises(ModelError, match=r"still running after 1 s; a template may take 1 s"):
        render_chat(HUNGRY["nested empty loops"], USER)


HOSTILE = (
    "{{ ''.__class__ }}",
    "{{ messages.__class__ }}",
    "{{ messages['__class__'] }}",
    "{{ ''|attr('__class__') }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ ().__class__.__base__.__subclasses__() }}",
    "{{ lipsum.__globals__['os'].system('true') }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__self__ }}",
    "{% set x = messages.append(1) %}",
    "{% set x = messages[0].update(role='system') %}",
)


@pytest.mark.parametrize("source", HOSTILE)
def test_hostile_templates_are_refused(source):
    with pytest.raises(ModelError, match=r"line 1: .*do not trust the file") as error:
        render_chat(source, USER)
    check_message(str(error.value))
    assert USER == [{"role": "user", "content": "hi <é> & 'you'"}]


WRONG = {
    "{{ raise_exception('roles\nalternate') }}": "refuses this conversation: roles alternate",
    "{% if %}": "line 1: not a template",
    "a\n\n{% endfor %}": "line 3: not a template",
    "a\n{{ nope.x }}": "line 2: UndefinedError: 'nope' is undefined",
    "{{ 1 / 0 }}": "line 1: ZeroDivisionError",
    "{{ 'a' + 1 }}": "line 1: TypeError",
    "{% include 'other' %}": "line 1: TypeError: no loader",
    "{{ messages|nonsense }}": "No filter named 'nonsense'",
}


@pytest.mark.parametrize("source", WRONG)
def test_wrong_templates(source):
    with pytest.raises(ModelError) as error:
        render_chat(source, USER)
    assert WRONG[source] in str(error.value)
    check_message(str(error.value))


@pytest.mark.parametrize("metadata", [{}, {"tokenizer.chat_template": 7}])
def test_no_template(metadata):
    with pytest.raises(ModelError, match=r"(missing|a int); a chat needs a template") as error:
        render_chat(metadata, USER)
    check_message(str(error.value))


def test_variables_must_be_json():
    with pytest.raises(PnrtError, match="a template takes JSON data"):
        render_chat("x", [{"role": "user", "content": b"bytes"}])


def test_files_cannot_be_written(tmp_path):
    # should a template ever get out of its language
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import sandbox; sandbox._limit(9, 1 << 29)\n"
        "with open(sys.argv[2], 'w') as file: file.write('x' * 9)"
    )
    target = tmp_path / "target"
    command = [sys.executable, "-c", code, str(Path(template.__file__).parent), str(target)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "File too large" in run.stderr
    assert target.stat().st_size == 0


def test_a_dead_process_is_an_error(monkeypatch):
    monkeypatch.setattr(template.sys, "path", [])
    with pytest.raises(ModelError, match="its process ended with 1: ModuleNotFoundError"):
        render_chat("x", USER)
    monkeypatch.setattr(template.sys, "executable", "/nowhere/python")
    with pytest.raises(PnrtError, match="process of their own"):
        render_chat("x", USER)


def test_import_is_light():
    code = "import sys, pnrt.text.template, pnrt.text.sampling; print('jinja2' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def check_message(message):
    """Where and what was found; what is allowed; what to do."""
    assert message.startswith("tokenizer.chat_template")
    assert "; " in message
    assert message.endswith(".")
