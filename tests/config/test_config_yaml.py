"""YAML with lines: types, references to the environment, and faults that name their place."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.config_yaml import Problem, field_name, load_document


def value_of(text: str, environ: dict[str, str] | None = None) -> Any:
    document = load_document(text, "f.yaml", environ or {})
    assert document.problems == []
    return document.value


def problems_of(text: str, environ: dict[str, str] | None = None) -> list[str]:
    return [str(each) for each in load_document(text, "f.yaml", environ or {}).problems]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("12", 12),
        ("-3", -3),
        ("010", 10),
        ("0.5", 0.5),
        ("2e-8", 2e-8),
        ("1" * 30, 1e30 / 9),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("'12'", "12"),
        ('"true"', "true"),
        ('""', ""),
        ("[1, a]", [1, "a"]),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
    ],
)
def test_plain_scalars_have_the_types_of_yaml_1_2_and_quoted_ones_are_text(written: str, value: object) -> None:
    assert value_of(f"x: {written}") == {"x": pytest.approx(value) if isinstance(value, float) else value}


@pytest.mark.parametrize(
    "word", ["on", "off", "yes", "no", "y", "12:30", "2026-12-01", ".inf", ".nan", "0x10", "1_000"]
)
def test_what_only_yaml_1_1_takes_for_something_else_is_text(word: str) -> None:
    assert value_of(f"x: {word}") == {"x": word}


def test_keys_are_text_whatever_they_look_like() -> None:
    assert value_of("1: a\ntrue: b\n2026-12-01: c") == {"1": "a", "true": "b", "2026-12-01": "c"}


def test_aliases_stand_for_their_anchors() -> None:
    assert value_of("a: &x {n: 1}\nb: *x") == {"a": {"n": 1}, "b": {"n": 1}}


def test_an_empty_document_has_no_value() -> None:
    assert value_of("# nothing\n") is None


# References to the environment


def test_a_variable_takes_the_place_of_its_reference() -> None:
    assert value_of("x: http://${HOST}:${PORT}/", {"HOST": "a", "PORT": "1"}) == {"x": "http://a:1/"}


@pytest.mark.parametrize("environ", [{}, {"HOST": ""}])
def test_the_default_is_taken_for_a_variable_that_is_unset_or_empty(environ: dict[str, str]) -> None:
    assert value_of("x: ${HOST:-localhost}", environ) == {"x": "localhost"}


def test_a_set_variable_wins_over_the_default() -> None:
    assert value_of("x: ${HOST:-localhost}", {"HOST": "b"}) == {"x": "b"}


@pytest.mark.parametrize(
    ("replacement", "value"), [("3", 3), ("true", True), ("null", None), ("", None), ("a: b", "a: b")]
)
def test_a_lone_unquoted_reference_has_the_type_of_its_replacement(replacement: str, value: object) -> None:
    assert value_of("x: ${N}", {"N": replacement}) == {"x": value}


def test_a_quoted_reference_is_text() -> None:
    assert value_of('x: "${N}"', {"N": "3"}) == {"x": "3"}


def test_a_reference_within_more_text_is_text() -> None:
    assert value_of("x: ${N}0", {"N": "3"}) == {"x": "30"}


def test_keys_may_hold_references() -> None:
    assert value_of("${MODEL}: 1", {"MODEL": "llama"}) == {"llama": 1}


def test_a_doubled_dollar_keeps_a_reference_as_it_is() -> None:
    assert value_of("x: $${HOST}") == {"x": "${HOST}"}


def test_dollars_without_a_brace_are_ordinary() -> None:
    assert value_of("x: pa$$w0rd$HOME") == {"x": "pa$$w0rd$HOME"}


@given(st.text(alphabet="ab$-:1 ", max_size=12))
def test_a_variable_is_not_searched_for_references_again(value: str) -> None:
    assert value_of('x: "${N}"', {"N": value + "${N}"}) == {"x": value + "${N}"}


def test_a_variable_that_is_unset_without_a_default_is_a_problem_at_its_field() -> None:
    assert problems_of("a:\n  - x: 1\n    y: ${HOST}") == [
        "f.yaml:3: a[0].y: not set in the environment and without a default: HOST"
    ]


def test_all_unset_variables_of_a_value_are_named() -> None:
    assert problems_of("x: ${A}:${B}:${A}") == ["f.yaml:1: x: not set in the environment and without a default: A, B"]


@pytest.mark.parametrize("written", ["${HOST", "${HOST:localhost}", "${}", "${1A}", "${A-B}"])
def test_what_begins_like_a_reference_and_is_none_is_a_problem(written: str) -> None:
    assert problems_of(f"x: a{written}", {"HOST": "h"}) == [
        "f.yaml:1: x: ${ must begin ${NAME} or ${NAME:-default}; $${ stands for itself"
    ]


# Faults


def test_a_key_given_twice_is_a_problem_that_names_both_lines() -> None:
    assert problems_of("a:\n  b: 1\n  c: 2\n  b: 3") == ["f.yaml:4: a.b: given twice; first on line 2"]


def test_a_key_that_is_not_text_is_a_problem() -> None:
    assert problems_of("a:\n  ? [x, y]\n  : 1") == ["f.yaml:2: a: a key must be text"]


@pytest.mark.parametrize("written", ["!!int x", "!thing x", "!!set {a, b}", "!!python/object:os.system [ls]"])
def test_tags_are_problems(written: str) -> None:
    [problem] = problems_of(f"a: {written}")
    assert problem.startswith("f.yaml:1: a: the tag ")
    assert problem.endswith(" is not supported")


def test_an_alias_inside_its_own_anchor_is_a_problem() -> None:
    assert problems_of("a: &x\n  b: *x") == ["f.yaml:2: a.b: refers to itself"]


def test_a_value_below_its_key_is_reported_on_the_line_of_the_key() -> None:
    assert problems_of("a:\n  ${HOST}") == ["f.yaml:1: a: not set in the environment and without a default: HOST"]


def test_a_syntax_error_names_line_and_column() -> None:
    assert problems_of("a: 1\nb: [1, 2\nc: 3") == [
        "f.yaml:3: not YAML: while parsing a flow sequence: expected ',' or ']', but got ':' (column 2)"
    ]


def test_a_second_document_is_a_problem() -> None:
    [problem] = problems_of("a: 1\n---\nb: 2")
    assert problem.startswith("f.yaml:2: not YAML: expected a single document")


def test_a_control_character_is_a_problem_on_its_line() -> None:
    assert problems_of("a: 1\nb: \x07") == ["f.yaml:2: not YAML: U+0007 is not allowed"]


@given(st.text(alphabet="ab:-[]{}&*!|>'\"#%@$\n\t ,?1", max_size=40))
def test_any_text_has_a_value_or_a_problem(text: str) -> None:
    document = load_document(text, "f.yaml", {})
    assert all(each.line >= 1 for each in document.problems)
    assert document.problems or document.value is None or isinstance(document.value, str | int | float | list | dict)


def test_the_first_reason_to_reject_a_value_hides_those_inside_it() -> None:
    document = load_document("a:\n  b: 1\nc: 2", "f.yaml", {})
    document.reject(("a",), "is bad")
    document.reject(("a", "b"), "follows from it")
    document.reject(("a",), "is bad in another way")
    document.reject(("c",), "is bad too")
    assert list(map(str, document.problems)) == ["f.yaml:1: a: is bad", "f.yaml:3: c: is bad too"]


def test_a_problem_without_a_line_names_the_file_alone() -> None:
    assert str(Problem("command line", 0, "--listen", "is bad")) == "command line: --listen: is bad"


def test_fields_are_named_as_an_operator_would() -> None:
    assert field_name(("models", "*", "instances", 0, "url")) == "models.*.instances[0].url"
