"""`kvroute serve --instance URL`: a configuration without a file."""

from pathlib import Path

import pytest

from kvroute.config import Config, ConfigError, config_for_instances
from kvroute.policies.registry import BUILT_IN


def test_instances_alone_serve_whatever_models_they_list() -> None:
    config = config_for_instances(["http://a:1", "http://b:1"])
    assert config == Config.model_validate({"models": {"*": {"instances": ["http://a:1", "http://b:1"]}}})


def test_options_take_the_place_of_settings() -> None:
    config = config_for_instances(
        ["http://a:1"],
        listen=":80",
        admin="127.0.0.1:0",
        tokenizer="/models/m",
        policy="least_loaded",
        redis="redis://h",
    )
    assert config.server.listen == ("0.0.0.0", 80)
    assert config.server.admin == ("127.0.0.1", 0)
    assert config.index.url == "redis://h"
    assert config.models["*"].tokenizer == Path("/models/m")
    assert config.models["*"].policy == "least_loaded"


def test_policies_of_installed_packages_can_be_named() -> None:
    kinds = {**BUILT_IN, "mine": BUILT_IN["random"]}
    assert config_for_instances(["http://a:1"], policy="mine", kinds=kinds).models["*"].policy == "mine"


def test_problems_name_the_option() -> None:
    with pytest.raises(ConfigError) as caught:
        config_for_instances(["a:1", "http://b:1", "http://b:1"], listen="80", policy="min_prefil", redis="h:6379")
    assert str(caught.value).split("\n") == [
        "command line: --listen: must be HOST:PORT, such as 0.0.0.0:8000 or [::]:8000",
        "command line: --redis: must be a redis://, rediss:// or unix:// URL; "
        "special characters in a password are written as %XX",
        "command line: --instance: must be an http:// or https:// URL, such as http://10.0.0.1:8000",
        "command line: --policy: unknown policy 'min_prefil'; did you mean 'min_prefill'?",
        "command line: --instance: the instance 'b:1' is listed twice",
    ]


def test_at_least_one_instance_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"^command line: --instance: must not be empty$"):
        config_for_instances([])
