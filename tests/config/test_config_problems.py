"""Every fault is reported at once, with its line, its field and a reason in plain words."""

import json
import re
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from kvroute.config import Config, ConfigError, load_config, parse_config

KV_BYTES = "kv_bytes_per_token: must be auto, or a number of bytes, such as 131072 or 128KiB"
NAME = "must consist of visible ASCII characters other than /"
SECRET = "s3cr3t"
GOOD = """
models:
  m:
    instances: ["http://a:1"]
"""


def problems(text: str, environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(dedent(text), "f.yaml", environ or {})
    assert str(caught.value).split("\n") == [str(each) for each in caught.value.problems]
    return [str(each).removeprefix("f.yaml:") for each in caught.value.problems]


def problems_with(text: str) -> list[str]:
    """Those of sections that stand before a model that is in order."""
    return problems(dedent(text) + GOOD)


def test_all_faults_of_a_file_are_reported_in_the_order_of_its_lines() -> None:
    assert problems(
        """\
        server:
          lisen: 0.0.0.0:8000
          max_body: huge
          max_body: 1MiB
        index: {url: "${REDIS}"}
        models:
          m:
            tokenizr: /models/m
            policy: fast
            instances:
              - ftp://a:1
              - {url: "http://b:1", id: b}
              - {url: "http://c:1", id: b, weight: 2}
              - {url: "http://d:1", id: b}
          empty:
        policies:
          p: {use: min_prefil}
          q: {use: min_prefill, with: {tolerance: 1, tolerance_s: soon}}
        routes:
          - when: {model: n, prompt_tokens: many}
            policy: r
        """
    ) == [
        "2: server.lisen: unknown field; did you mean 'listen'?",
        "3: server.max_body: must be a size, such as 64KiB, 512MiB or 10GB",
        "4: server.max_body: given twice; first on line 3",
        "5: index.url: not set in the environment and without a default: REDIS",
        "8: models.m.tokenizr: unknown field; did you mean 'tokenizer'?",
        "9: models.m.policy: unknown policy 'fast'",
        "11: models.m.instances[0]: must be an http:// or https:// URL, such as http://10.0.0.1:8000",
        "13: models.m.instances[2].weight: unknown field",
        "14: models.m.instances[3]: the id 'b' stands for http://b:1 already",
        "15: models.empty.instances: is missing",
        "17: policies.p.use: unknown policy kind 'min_prefil'; did you mean 'min_prefill'?",
        "18: policies.q.with.tolerance: min_prefill has no parameter 'tolerance'; did you mean 'tolerance_s'?",
        "18: policies.q.with.tolerance_s: must be a number",
        "20: routes[0].when.model: unknown model 'n'",
        '20: routes[0].when.prompt_tokens: must be a comparison in quotes, such as ">= 32768"',
        "21: routes[0].policy: unknown policy 'r'",
    ]


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ("server: {listen: 8000}", "server.listen: must be HOST:PORT, such as 0.0.0.0:8000 or [::]:8000"),
        ("server: {admin: 0.0.0.0:8000}", "server.admin: must differ from server.listen"),
        ("server: {decision_headers: sometimes}", "server.decision_headers: must be 'on_request', 'always' or 'never'"),
        ("server: {header_timeout: 0}", "server.header_timeout: must be greater than 0"),
        ("server: [listen]", "server: must be a mapping"),
        ("index: {prefix: 7}", "index.prefix: must be text; put a number, true or false in quotes to make it text"),
        ("relay: {retries: 11}", "relay.retries: must be at most 10"),
        ("relay: {retries: true}", "relay.retries: must be a whole number, such as 500000, 500K or 1M"),
        ("health: {metrics: 3}", "health.metrics: must be true or false"),
        ("policies: {p: {with: {}}}", "policies.p.use: is missing"),
        ("policies: {p: min_prefill}", "policies.p: must be a mapping"),
        ("routes: {policy: random}", "routes: must be a list"),
        ("routes: [{when: {model: m}}]", "routes[0].policy: is missing"),
        ("routes: [{polcy: random, policy: random}]", "routes[0].polcy: unknown field; did you mean 'policy'?"),
        ("telemtry: {}", "telemtry: unknown field; did you mean 'telemetry'?"),
    ],
)
def test_a_wrong_setting_is_named_with_a_plain_reason(section: str, problem: str) -> None:
    assert problems_with(section) == [f"1: {problem}"]


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("block_tokens: 8", "block_tokens: must be at least 16"),
        ("kv_bytes_per_token: some", KV_BYTES),
        ("kv_bytes_per_token: 0", KV_BYTES),
        ("chat_template: t.jinja", "chat_template: needs a tokenizer as well"),
        ("pool: {path: /mnt}", "pool.name: is missing"),
        ("pool: {name: a/b}", f"pool.name: {NAME}"),
        ("pool: {name: a, bandwith: 1GB/s}", "pool.bandwith: unknown field; did you mean 'bandwidth'?"),
        ("cost: {prefill_tokens_per_s: 0}", "cost.prefill_tokens_per_s: must be greater than 0"),
        ("instances: []", "instances: must not be empty"),
        ("instances: http://a:1", "instances: must be a list"),
        ("instances: [{id: a}]", "instances[0].url: is missing"),
        (
            "instances: [{url: 'http://a:1', cost: {netwrk: 1}}]",
            "instances[0].cost.netwrk: unknown field; did you mean 'network'?",
        ),
        ("instances: [{url: 'http://a:1', id: ''}]", f"instances[0].id: {NAME}"),
    ],
)
def test_a_wrong_setting_of_a_model_is_named_with_a_plain_reason(setting: str, problem: str) -> None:
    instances = "" if setting.startswith("instances") else ", instances: ['http://a:1']"
    assert problems(f"models: {{pool: {{{setting}{instances}}}}}") == [f"1: models.pool.{problem}"]


@pytest.mark.parametrize(
    "url",
    "a:1 ftp://a http:// http://a:port http://a:99999 http://a:0 http://a\tb http://a?x=1 http://a# http://[::1".split(
        " "
    ),
)
def test_an_instance_needs_an_http_url(url: str) -> None:
    [problem] = problems(f"models: {{m: {{instances: ['{url}']}}}}")
    assert problem == "1: models.m.instances[0]: must be an http:// or https:// URL, such as http://10.0.0.1:8000"


@pytest.mark.parametrize("text", ["", "# nothing", "null", "{}"])
def test_a_file_without_models_says_so(text: str) -> None:
    [problem] = problems(text)
    assert problem.endswith(" models: is missing")


@pytest.mark.parametrize("text", ["[]", "models", "3"])
def test_a_file_that_is_no_mapping_says_so(text: str) -> None:
    assert problems(text) == ["1: must be a mapping"]


def test_a_syntax_error_is_the_only_problem_reported() -> None:
    [problem] = problems("models:\n  m: [")
    assert problem.startswith("2: not YAML: ")


def test_a_missing_file_is_a_problem(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "none.yaml", {})
    assert str(caught.value) == f"{tmp_path}/none.yaml: can't be read: No such file or directory"


def test_a_file_in_another_encoding_is_a_problem(tmp_path: Path) -> None:
    file = tmp_path / "latin.yaml"
    file.write_bytes("models: é".encode("latin-1"))
    with pytest.raises(ConfigError, match="can't be read: not UTF-8"):
        load_config(file, {})


# Instances are known by their ids over the whole file.


def test_an_instance_may_serve_several_models() -> None:
    config = parse_config("models: {m: {instances: ['http://a:1']}, n: {instances: ['http://a:1/']}}", "f.yaml", {})
    assert config.models["m"].instances[0].name == config.models["n"].instances[0].name == "a:1"


def test_an_instance_is_listed_once_in_a_model() -> None:
    assert problems("models: {m: {instances: ['http://a:1', 'http://a:1/']}}") == [
        "1: models.m.instances[1]: the instance 'a:1' is listed twice"
    ]


def test_an_id_stands_for_one_url_over_all_models() -> None:
    assert problems(
        "models: {m: {instances: [{url: 'http://a:1', id: x}]}, n: {instances: [{url: 'http://b:1', id: x}]}}"
    ) == ["1: models.n.instances[0]: the id 'x' stands for http://a:1 already"]


def test_a_url_has_one_id_over_all_models() -> None:
    assert problems("models: {m: {instances: ['http://a:1']}, n: {instances: [{url: 'http://a:1', id: x}]}}") == [
        "1: models.n.instances[0]: http://a:1 has the id 'a:1' already"
    ]


# Secrets


@pytest.mark.parametrize(
    "setting",
    [
        f"index: {{url: 'redis://:{SECRET}@host:port/0'}}",
        f"index: {{url: 'redis://:{SECRET}/x@host:6379/0'}}",
        f"index: {{url: 'http://:{SECRET}@host'}}",
        "index: {url: 'http://:${PASSWORD}@host'}",
        f"models: {{x: {{instances: ['http://user:{SECRET}@host']}}}}",
        f"models: {{x: {{instances: [{{url: 'http://user:{SECRET}@host', id: x}}]}}}}",
    ],
)
def test_no_problem_repeats_a_password(setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(setting + ("" if setting.startswith("models") else GOOD), "f.yaml", {"PASSWORD": SECRET})
    assert SECRET not in str(caught.value)
    assert "URL" in str(caught.value) or "user name or password" in str(caught.value)


# Whatever is written, the outcome is a configuration or problems in plain words.


def _words(section: type[BaseModel]) -> set[str]:
    return {each.alias or name for name, each in section.model_fields.items()}


SCALARS = st.sampled_from(
    [None, True, 0, -1, 3, 2.5, "", "x", "30s", "http://a:1", "redis://h", ":80", ">= 3", "random"]
)
KEYS = st.sampled_from(
    sorted({"server", "listen", "models", "instances", "url", "id", "pool", "cost", "policies", "use", "with", "routes"}
           | {"when", "header", "prompt_tokens", "policy", "*", "0", "m"} | _words(Config))
)  # fmt: skip
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=20
)


def outcome(text: str) -> Config | ConfigError:
    try:
        return parse_config(text, "f.yaml", {})
    except ConfigError as error:
        return error


@given(st.dictionaries(KEYS, VALUES, max_size=5))
def test_any_document_is_a_configuration_or_a_list_of_plain_problems(document: dict[str, object]) -> None:
    found = outcome(json.dumps(document))
    if isinstance(found, Config):
        assert found.models
    else:
        assert found.problems
        for problem in found.problems:
            assert problem.line == 1
            assert not re.search(r"pydantic|Settings|nput|validator|\[key\]", problem.reason + problem.field)
