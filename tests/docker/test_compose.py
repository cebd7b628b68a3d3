"""The compose file: valid, hardened, and its parts know one another by the right names."""

import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry

import kvroute.simulator
from kvroute.config import load_config
from kvroute.simulator.process import free_port
from tests.support.dockerfile import read_stages
from tests.support.linters import lint
from tests.support.redis_server import find_redis

DOCKER = Path(__file__).parents[2] / "docker"
COMPOSE = DOCKER / "compose.yaml"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text("utf-8"))["services"]
GATEWAY = load_config(DOCKER / "gateway.yaml", {})
ENGINES = {name: each for name, each in SERVICES.items() if "kvroute.simulator" in each.get("entrypoint", ())}
_, IMAGE = read_stages(DOCKER / "Dockerfile")


def test_it_follows_the_compose_specification() -> None:
    assert lint("check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE)) == ""


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_service_is_built_from_our_dockerfile_or_pulled_by_tag(name: str) -> None:
    service = SERVICES[name]
    if "build" in service:
        context = (DOCKER / service["build"]["context"]).resolve()
        assert context / service["build"]["dockerfile"] == DOCKER / "Dockerfile"
    else:
        assert service["image"].partition(":")[2] not in ("", "latest")


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_service_can_write_nothing_and_gain_nothing(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


def test_whatever_is_waited_for_to_be_healthy_has_a_health_check() -> None:
    assert any(each.name == "HEALTHCHECK" for each in IMAGE)
    for service in SERVICES.values():
        for other, wait in service.get("depends_on", {}).items():
            assert wait == {"condition": "service_healthy"}
            assert "healthcheck" in SERVICES[other] or "build" in SERVICES[other]


def test_the_public_port_is_published_and_the_admin_port_on_loopback_only() -> None:
    assert GATEWAY.server.admin is not None
    public, admin = GATEWAY.server.listen[1], GATEWAY.server.admin[1]
    assert SERVICES["gateway"]["ports"] == [f"{public}:{public}", f"127.0.0.1:{admin}:{admin}"]
    assert [name for name, each in SERVICES.items() if "ports" in each] == ["gateway"]


def test_the_gateway_reads_its_file_where_the_image_looks_for_it() -> None:
    [command] = [each.words for each in IMAGE if each.name == "CMD"]
    assert SERVICES["gateway"]["volumes"] == [f"./gateway.yaml:{command[-1]}:ro"]
    assert "command" not in SERVICES["gateway"]


def test_the_gateways_instances_are_the_engines() -> None:
    [model] = GATEWAY.models.values()
    addresses = {(urlsplit(each.url).hostname, str(urlsplit(each.url).port)) for each in model.instances}
    assert addresses == {(name, option(each["command"], "--port")) for name, each in ENGINES.items()}
    assert len(addresses) == 2


def test_the_engines_serve_the_gateways_model_on_all_addresses() -> None:
    for engine in ENGINES.values():
        assert option(engine["command"], "--host") == "0.0.0.0"
        assert {option(engine["command"], "--model-name")} == set(GATEWAY.models)


def test_the_engines_are_asked_for_their_health_on_their_own_port() -> None:
    for engine in ENGINES.values():
        port = option(engine["command"], "--port")
        assert engine["environment"] == {"KVROUTE_HEALTH_URL": f"http://127.0.0.1:{port}/health"}


def test_the_gateway_has_the_simulators_tokenizer() -> None:
    [model] = GATEWAY.models.values()
    assert model.tokenizer is not None
    [image] = [each.words[0] for each in IMAGE if each.name == "FROM"]
    [source] = [each.words[-1] for each in IMAGE if each.name == "COPY"]
    python = image.partition(":")[2].partition("-")[0]
    inside = model.tokenizer.relative_to(f"{source}/lib/python{python}/site-packages/kvroute/simulator")
    assert (Path(kvroute.simulator.__path__[0]) / inside / "tokenizer.json").is_file()


def test_the_gateway_uses_the_redis_of_the_compose_file() -> None:
    assert GATEWAY.index.url is not None
    url = urlsplit(GATEWAY.index.url)
    assert url.hostname is not None
    assert SERVICES[url.hostname]["image"].startswith("redis:")
    assert url.port == 6379


def test_the_gateway_may_finish_its_answers_before_it_is_killed() -> None:
    grace: str = SERVICES["gateway"]["stop_grace_period"]
    assert float(grace.removesuffix("s")) > GATEWAY.server.drain_timeout


def test_a_redis_server_accepts_the_command_and_bounds_its_memory(tmp_path: Path) -> None:
    program, *arguments = SERVICES["redis"]["command"]
    assert program == "redis-server"
    port = free_port()
    here = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(tmp_path)]
    retry = Retry(ConstantBackoff(0.05), 200, (RedisConnectionError,))
    with (
        subprocess.Popen([find_redis(), *arguments, *here], stdout=subprocess.DEVNULL) as server,
        Redis(port=port, decode_responses=True, retry=retry) as client,
    ):
        try:
            settings = client.config_get("maxmemory", "maxmemory-policy", "save", "appendonly")
        finally:
            server.terminate()
    assert settings == {
        "maxmemory": str(256 * 1024**2),
        "maxmemory-policy": "allkeys-lru",
        "save": "",
        "appendonly": "no",
    }


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]
