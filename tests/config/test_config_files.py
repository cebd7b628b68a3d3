"""What we ship: ready configurations that load, and a reference that leaves no field out and tells true defaults."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

from kvroute.config import Config, load_config, parse_config
from kvroute.policies.registry import BUILT_IN

ROOT = Path(__file__).parents[2]
REFERENCE = (ROOT / "docs/configuration.md").read_text("utf-8")
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
EXAMPLES = re.findall(r"^```yaml\n(.*?)^```", REFERENCE, re.M | re.S)

ROWS = dict(re.findall(r"^\| `([a-z][^`|]*)` \| [^|]+ \| ([^|]+?) \| [^|]+ \|$", REFERENCE, re.M))
"""The reference's tables of fields: name -> default, as written."""


def fields(annotation: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(name, default) of every field that a value of this type has, where the reference writes NAME for a key and []
    for a position; of a field that is a section of its own and always there, the section's fields instead."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, each in annotation.model_fields.items():
            inner = list(fields(each.annotation, f"{path}.{each.alias or name}".lstrip(".")))
            yield from inner or [(f"{path}.{each.alias or name}", "required" if each.is_required() else "")]
    elif get_origin(annotation) in (dict, tuple):
        key = ".NAME" if get_origin(annotation) is dict else "[]"
        for each in get_args(annotation):
            yield from fields(each, path + key)
    else:
        for each in get_args(annotation):
            yield from fields(each, path)


FIELDS = dict(fields(Config))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda each: each.name)
def test_a_ready_configuration_loads_without_any_environment(file: Path) -> None:
    assert load_config(file, {}).models


def test_the_environment_reaches_a_ready_configuration() -> None:
    config = load_config(ROOT / "configs/production.yaml", {"KVROUTE_REDIS": "rediss://cache:6380/3", "MODELS": "/srv"})
    assert config.index.url == "rediss://cache:6380/3"
    assert {model.tokenizer.parent for model in config.models.values() if model.tokenizer} == {Path("/srv")}


def test_the_flash_pool_starts_from_what_was_measured() -> None:
    [model] = load_config(ROOT / "configs/flash-pool.yaml", {}).models.values()
    cost = model.cost_parameters(model.instances[0], None)
    layers, heads, head_size, bytes_a_number = 62, 8, 128, 2
    assert cost.kv_bytes_per_token == layers * 2 * heads * head_size * bytes_a_number
    prompt = 30_208
    wave_of_32 = cost.pool_latency_s + 32 * prompt * cost.kv_bytes_per_token / cost.pool_bytes_per_s
    assert 24.83 <= wave_of_32 <= 26.81, "TTFT p50 seen on two instances at TP4 with 32 cold readers"
    assert prompt / cost.prefill_tokens_per_s == pytest.approx(15.1, rel=0.01)


def test_the_reference_has_every_field() -> None:
    assert len(FIELDS) > 40
    assert [name for name in FIELDS if name not in ROWS] == []


def test_the_reference_has_no_field_that_is_not_there() -> None:
    sections = {name.rpartition(".")[0].removesuffix("[]") for name in FIELDS}
    assert [name for name in ROWS if name not in FIELDS and name not in sections] == []


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_the_default_in_the_reference_is_the_one_in_force(name: str) -> None:
    """Written into a file, the default changes nothing; and what must be given is said to be required."""
    if FIELDS[name] == "required":
        assert ROWS[name] == "required"
        return
    written = re.match(r"`([^`]*)`", ROWS[name])
    assert written is not None
    assert parse(name, written[1]) == parse(name, None)


def parse(name: str, written: str | None) -> Config:
    """The smallest configuration that has the section of `name`, with `name` as `written` or left out."""
    document: dict[str, Any] = {
        "models": {"NAME": {"instances": [{"url": "http://a:1"}]}},
        "policies": {"NAME": {"use": "random"}},
        "routes": [{"policy": "random"}],
    }
    if ".pool." in name:
        document["models"]["NAME"]["pool"] = {"name": "flash"}
    *steps, last = name.replace("[]", ".0").split(".")
    section: Any = document
    for step in steps:
        section = section[int(step)] if isinstance(section, list) else section.setdefault(step, {})
    if written is not None:
        section[last] = yaml.safe_load(written)
    return parse_config(yaml.safe_dump(document), name, {})


@pytest.mark.parametrize("kind", sorted(BUILT_IN))
def test_the_reference_has_every_policy_with_its_parameters_and_defaults(kind: str) -> None:
    [parameters] = re.findall(rf"^\| `{kind}` \| ([^|]*)\|[^|]+\|$", REFERENCE, re.M)
    expected = [f"`{each.name}: {each.default}`" for each in dataclasses.fields(BUILT_IN[kind]) if each.init]
    assert parameters.strip() == ", ".join(expected)


@pytest.mark.parametrize("position", range(len(EXAMPLES)))
def test_an_example_in_the_reference_is_in_order(position: int) -> None:
    example = EXAMPLES[position]
    if "models:" not in example:
        example += "models: {qwen3-coder-480b: {instances: ['http://a:1']}}\n"
    assert parse_config(example, "example", {}).models


def test_the_problems_in_the_reference_are_reported_like_that() -> None:
    [shown] = re.findall(r"^```\n(kvroute\.yaml:.*?)^```", REFERENCE, re.M | re.S)
    text = """\
server:
  lisen: 0.0.0.0:8000
models:
  llama-3.1-8b:
    instances:
      - url: http://10.0.0.1:8000
      - url: 10.0.0.2:8000
routes:
  - policy: batch
"""
    with pytest.raises(Exception, match="unknown") as caught:
        parse_config(text, "kvroute.yaml", {})
    assert str(caught.value) == shown.rstrip("\n")
