"""YAML files: what is read, where it stands, and what is refused."""

from __future__ import annotations

import contextlib
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from brim.errors import RequestError
from brim.settings import yaml_file, yaml_nodes
from brim.settings.yaml_file import MOST_BYTES, Document, inspect_yaml, parse_value, read_yaml

LOADERS = [yaml.SafeLoader, *([yaml.CSafeLoader] if yaml.__with_libyaml__ else [])]


@pytest.fixture(params=LOADERS, ids=lambda loader: loader.__name__)
def _parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_nodes, "_Loader", request.param)


def written(folder: Path, content: str | bytes) -> Path:
    path = folder / "file.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(folder: Path, content: str | bytes) -> Document:
    return read_yaml(written(folder, content))


def complaints(folder: Path, content: str | bytes) -> list[tuple[int | None, str, str]]:
    """(line, key, message) of every error."""
    document, problems = inspect_yaml(written(folder, content))
    errors = [problem for problem in problems if problem.severity == "error"]
    assert (document is None) == bool(errors)
    assert all(problem.file.endswith("file.yaml") for problem in problems)
    return [(problem.line, problem.key, problem.message) for problem in errors]


def test_values_come_as_safe_load_reads_them_and_know_their_lines(tmp_path: Path) -> None:
    text = 'hp:\n  epochs: 3\n  "name": x\ngrid:\n  model.type: [\n    a,\n    b ]\nnone:\n'
    document = read(tmp_path, text)
    assert document.data == yaml.safe_load(text)
    assert document.line("hp", "epochs") == 2
    assert document.mark("hp", "name") == (3, 3)
    assert document.line("grid", "model.type") == 5
    assert document.line("grid", "model.type", 1) == 7
    assert document.line("hp", "missing") == 1
    assert document.line("missing") is None
    assert document.line_of("hp.epochs") == 2
    assert document.line_of("grid.model.type") == 5
    assert document.line_of("hp.other") is None


@pytest.mark.usefixtures("_parser")
@pytest.mark.parametrize("text", ["1e-3", "1E5", "-2e+1", "1.e-8", ".5e3", "+1e2"])
def test_numbers_with_an_exponent_are_numbers(tmp_path: Path, text: str) -> None:
    value = read(tmp_path, f"a: {text}\n").data["a"]
    assert value == float(text)
    assert isinstance(value, float)


def test_text_that_only_looks_like_a_number_or_a_date_stays_text(tmp_path: Path) -> None:
    text = "a: 1e-3x\nb: 2024-01-01\nc: '1e-3'\nd: e5\ne: =\nf: 0o17\ng: 1e\n"
    assert list(read(tmp_path, text).data.values()) == ["1e-3x", "2024-01-01", "1e-3", "e5", "=", "0o17", "1e"]


def test_what_yaml_1_1_reads_otherwise_than_people_is_warned_of(tmp_path: Path) -> None:
    document = read(tmp_path, "a: yes\nb: 010\nc: 1:30\non: 1\nd: 'no'\ne: true\nf: 0\ng: 0x10\n")
    assert document.data == {"a": True, "b": 8, "c": 90, "on": 1, "d": "no", "e": True, "f": 0, "g": 16}
    assert [(problem.line, problem.severity) for problem in document.problems] == [
        (1, "warning"), (2, "warning"), (3, "warning"), (4, "warning"),
    ]  # fmt: skip


def test_anchors_merges_and_plain_tags_work(tmp_path: Path) -> None:
    text = "base: &b {x: 1, y: [2]}\none: {<<: *b, x: 3}\ntwo: {<<: [{x: 9}, *b]}\nn: !!int '3'\ns: !!str 4\nt: ! 5\n"
    document = read(tmp_path, text)
    assert document.data == yaml.safe_load(text)
    document.data["one"]["y"].append(0)
    assert document.data["base"]["y"] == [2]  # nothing is shared


def test_a_byte_order_mark_and_windows_lines_are_fine(tmp_path: Path) -> None:
    document = read(tmp_path, b"\xef\xbb\xbfa: 1\r\nb:\r\n  c: 2\r\n")
    assert document.data == {"a": 1, "b": {"c": 2}}
    assert document.line("b", "c") == 3


@pytest.mark.usefixtures("_parser")
def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    text = "a: 1\nb: {x: 1, x: 2}\na: 3\n4: 5\nc: !!python/object:os.system {}\nd: !mine 1\ne: !!int word\n"
    assert complaints(tmp_path, text) == [
        (2, "b.x", "the key is there twice, first on line 2"),
        (3, "a", "the key is there twice, first on line 1"),
        (4, "", "the key 4 is read as a number, a truth value or nothing"),
        (5, "c", "the tag !!python/object:os.system is not allowed"),
        (6, "d", "the tag !mine is not allowed"),
        (7, "e", "'word' cannot be read as int"),
    ]


@pytest.mark.usefixtures("_parser")
def test_problems_before_a_broken_line_are_reported_too(tmp_path: Path) -> None:
    found = complaints(tmp_path, "a: 1\na: 2\nb: [1, 2\nc: 3\n")
    assert found[0] == (2, "a", "the key is there twice, first on line 1")
    assert found[1][0] in (3, 4)
    assert found[1][2].startswith("not YAML: while parsing a flow sequence")


@pytest.mark.usefixtures("_parser")
@pytest.mark.parametrize(
    ("text", "line"),
    [("a:\n\tb: 1\n", 2), ("a:\n  b: 1\n\tc: 2\n", 3), ("a:\t1\n", 1), ("a: [1,\n\t2]\n", 2), ("a: 1\t\nb: 2\n", 1)],
)
def test_a_tab_is_refused_with_its_line(tmp_path: Path, text: str, line: int) -> None:
    assert (line, "", "there is a tab") in complaints(tmp_path, text)


@pytest.mark.usefixtures("_parser")
def test_tabs_inside_of_values_and_comments_are_fine(tmp_path: Path) -> None:
    text = "a: 'x\ty' # a\tcomment\n#\tone more\nb: |\n  first\n  \tsecond\nc: \"m\t\n  n\"\n"
    assert read(tmp_path, text).data["a"] == "x\ty"
    assert read(tmp_path, text).data["b"] == "first\n\tsecond\n"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "the file is empty"),
        ("# nothing\n", 1, "the file is empty"),
        ("---\n", 1, "the file is empty"),
        ("- a\n- b\n", 1, "the file is a list"),
        ("\nword\n", 2, "the file is a single value"),
        ("a: 1\n---\nb: 2\n", 3, "a second document begins"),
        ("a: *b\n", 1, r"the alias \*b has no anchor"),
        ("a: &a\n  - *a\n", 2, r"the alias \*a refers to itself"),
        ("a: 1\nb: \x00\n", 2, r"the character U\+0000 is not allowed"),
        ("a: " + "9" * 5000 + "\n", 1, "cannot be read as int"),
        ("a: !!map 3\n", 1, "cannot be read as map"),
        ("a: !!seq {b: 1}\n", 1, "does not fit a mapping"),
        ("a: {<<: 3}\n", 1, "<< takes a mapping"),
        ("? [1, 2]\n: 3\n", 1, "a list is used as a key"),
        ("true: 1\n", 1, "the key true is read as"),
        ("~: 1\n", 1, "the key ~ is read as"),
        ("'': 1\n", 1, "a key is empty"),
        ("a: !!set {b, c}\n", 1, "the tag !!set is not allowed"),
        ("a: !!binary aGVsbG8=\n", 1, "the tag !!binary is not allowed"),
        ("a: b: c\n", 1, "not YAML"),
        ("a: 'open\n", None, "not YAML"),
    ],
)
def test_an_invalid_settings_file_is_refused_with_line_and_reason(
    tmp_path: Path, text: str, line: int | None, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        read(tmp_path, text)
    if line is not None:
        assert complaints(tmp_path, text)[0][0] == line


def test_bytes_that_are_not_utf_8_are_reported_with_their_line(tmp_path: Path) -> None:
    assert complaints(tmp_path, b"a: 1\nb: \xff\n") == [(2, "", "byte 8 (0xff) is not UTF-8")]
    assert complaints(tmp_path, "a: 1\n".encode("utf-16"))[0][0] == 1


@pytest.mark.usefixtures("_parser")
def test_a_bomb_of_aliases_is_found_before_it_is_written_out(tmp_path: Path) -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 60)]
    ((line, key, message),) = complaints(tmp_path, "\n".join(levels))
    assert (line, key) == (6, "a5")
    assert "more than 500,000 values" in message
    merges = ["a0: &a0 {k: v}"] + [f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 40)]
    assert "more than" in complaints(tmp_path, "\n".join(merges))[0][2]


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_deep_nesting_is_refused(tmp_path: Path, opening: str) -> None:
    assert "more than 64 levels" in complaints(tmp_path, "a: x\nb:\n " + opening * 50_000)[0][2]
    chain = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 80)]
    assert "more than 64 levels" in complaints(tmp_path, "\n".join(chain))[0][2]


def test_a_file_that_cannot_be_read_is_a_wrong_request(tmp_path: Path) -> None:
    (tmp_path / "trainning.yaml").touch()
    with pytest.raises(RequestError, match=r"missing\.yaml: there is no such file$"):
        read_yaml(tmp_path / "nowhere" / "missing.yaml")
    with pytest.raises(RequestError, match=r"training\.yaml: there is no such file; did you mean trainning\.yaml\?"):
        read_yaml(tmp_path / "training.yaml")
    with pytest.raises(RequestError, match=r": it is a folder; give a YAML file"):
        read_yaml(tmp_path)
    with pytest.raises(RequestError, match="cannot be read"):
        read_yaml(tmp_path / "trainning.yaml" / "training.yaml")
    with pytest.raises(RequestError, match="cannot be read"):
        read_yaml("a\0b")
    with pytest.raises(RequestError, match="larger than 8 MiB"):
        read(tmp_path, b"#" * (MOST_BYTES + 1))


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.01", 0.01), ("1e-3", 0.001), ("auto", "auto"), ("[1, 2]", [1, 2]), ("null", None), ("true", True),
     ("py:models.py:make", "py:models.py:make"), ("{a: 1}", {"a": 1}), ("'12'", "12"), ("C:\\data", "C:\\data")],
)  # fmt: skip
def test_a_typed_value_is_read_as_in_a_file(text: str, value: Any) -> None:
    assert parse_value(text, argument="k") == value


@pytest.mark.parametrize("text", ["", "  ", "[1", "*a", "!!python/name:os.system", "a\n---\nb", "{a: 1, a: 2}", "\x01"])
def test_a_typed_value_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"^hp\.x=1: "):
        parse_value(text, argument="hp.x=1")


TEXTS = st.text(min_size=1).filter(lambda text: not re.fullmatch(r"[-+.\d]+[eE][-+]?\d+", text))  # 1e3 is a number here
PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=15,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.dictionaries(TEXTS, PLAIN, min_size=1, max_size=5), flow=st.booleans())
def test_whatever_safe_dump_writes_is_read_back(tmp_path: Path, data: dict[str, Any], flow: bool) -> None:
    text = yaml.safe_dump(data, default_flow_style=flow, sort_keys=False)
    document = read(tmp_path, text)
    assert document.data == data
    assert list(document.data) == list(data)
    assert set(document.marks) >= {(key,) for key in data}


MARKS = [
    *("a", "b: 1", "\n", "  ", "\t", "- ", "[", "]", "{", "}", ": ", ",", "&x ", "*x", "!!int ", "!t ", "<<: ", "|\n"),
    *("'", '"', "#", "? ", "---\n", "...\n", "%YAML 1.2\n", "1e3", "0o7", "1:2", ".nan", "\\", "\r", "\x85", "\ufeff"),
    *("é", "~", "=", ">-\n"),
]


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.lists(st.sampled_from(MARKS), max_size=40).map(lambda parts: "".join(parts).encode()),
    )
)
@example(b"\xff\xfea\x00:\x00")
@example(b"a: !<tag:yaml.org,2002:int> 0x\n")
@example(b"a: !!float .\n")
@example(b"a: !!bool maybe\n")
@example(b"a: 0b\n")
@example(b"a: !!int ''\n")
@example(b"a: -_:0\n")
def test_random_bytes_give_a_document_or_a_wrong_request(tmp_path: Path, content: bytes) -> None:
    for loader in LOADERS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(yaml_nodes, "_Loader", loader)
            with contextlib.suppress(RequestError):
                assert all(isinstance(key, str) for key in read(tmp_path, content).data)
    with contextlib.suppress(RequestError):
        parse_value(content.decode("latin-1"), argument="k")


def test_both_parsers_agree_on_a_real_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parent / "sweep_files" / "easytrain_grid.yaml").read_bytes()
    found = []
    for loader in LOADERS:
        monkeypatch.setattr(yaml_nodes, "_Loader", loader)
        document = read(tmp_path, text)
        found.append((document.data, document.marks))
    assert all(one == found[0] for one in found)
    assert found[0][0] == {**yaml.safe_load(text), **{key: found[0][0][key] for key in ("optimizer", "grid_search")}}


def test_a_large_file_is_read_in_one_pass(tmp_path: Path) -> None:
    draw = random.Random(0)
    lines = "".join(f"- {{model.type: m{draw.randrange(50)}, hp.batch_size: {n}}}\n" for n in range(3000))
    document = read(tmp_path, f"include:\n{lines}")
    assert document.line("include", 2999) == 3001
    assert yaml_file.MOST_BYTES >= 2**20
