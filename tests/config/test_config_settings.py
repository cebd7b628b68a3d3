"""What a valid file means: defaults, short forms, costs from the instance, the model and the default."""

import pytest
from pydantic import ValidationError

from kvroute.config import Config, ModelSettings, parse_config
from kvroute.cost.model import CostParameters

SMALLEST = 'models: {"*": {instances: ["http://a:1"]}}'


def config(text: str, environ: dict[str, str] | None = None) -> Config:
    return parse_config(text, "f.yaml", environ or {})


def model(text: str) -> ModelSettings:
    return config(f"models: {{m: {{{text}}}}}").models["m"]


def test_one_model_with_one_instance_is_enough() -> None:
    settings = config(SMALLEST)
    assert settings.server.listen == ("0.0.0.0", 8000)
    assert [each.url for each in settings.models["*"].instances] == ["http://a:1"]


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        config(SMALLEST).server.max_body = 1  # type: ignore[misc]


@pytest.mark.parametrize("section", ["server", "index", "telemetry", "relay", "health", "policies", "routes"])
def test_a_section_whose_lines_are_all_commented_out_is_at_its_defaults(section: str) -> None:
    assert config(f"{section}:\n  # nothing\n{SMALLEST}") == config(SMALLEST)


def test_the_admin_port_can_be_turned_off() -> None:
    assert config(f"server: {{admin: null}}\n{SMALLEST}").server.admin is None


def test_both_addresses_may_ask_for_any_free_port() -> None:
    server = config(f"server: {{listen: '127.0.0.1:0', admin: '127.0.0.1:0'}}\n{SMALLEST}").server
    assert server.listen == server.admin == ("127.0.0.1", 0)


@pytest.mark.parametrize("target", ["stderr", "stdout", "off", "/var/log/kvroute.jsonl"])
def test_the_request_log_takes_a_stream_a_path_or_off_without_quotes(target: str) -> None:
    assert config(f"telemetry: {{request_log: {target}}}\n{SMALLEST}").telemetry.request_log == target


@pytest.mark.parametrize("url", ["redis://h", "rediss://user:p%40ss@h:6380/2", "unix:///run/redis.sock?db=1"])
def test_the_index_url_is_any_that_the_client_takes(url: str) -> None:
    assert config(f"index: {{url: '{url}'}}\n{SMALLEST}").index.url == url


def test_an_empty_variable_leaves_the_index_in_memory() -> None:
    assert config("index:\n  url: ${REDIS_URL:-}\n" + SMALLEST).index.url is None


@pytest.mark.parametrize(
    ("written", "url", "name"),
    [
        ("'http://a:1'", "http://a:1", "a:1"),
        ("'https://a/'", "https://a", "a"),
        ("'http://[::1]:8000'", "http://[::1]:8000", "[::1]:8000"),
        ("'http://a:1/engine/v2/'", "http://a:1/engine/v2", "a:1|engine|v2"),
        ("{url: 'http://a:1'}", "http://a:1", "a:1"),
        ("{url: 'http://a:1', id: gpu-1}", "http://a:1", "gpu-1"),
    ],
)
def test_an_instance_is_a_url_or_a_mapping_and_is_called_by_its_id_or_address(
    written: str, url: str, name: str
) -> None:
    [instance] = model(f"instances: [{written}]").instances
    assert (instance.url, instance.name) == (url, name)


def test_counts_may_be_written_short() -> None:
    [instance] = model("instances: [{url: 'http://a:1', kv_tokens: 1M}]").instances
    assert instance.kv_tokens == 1_000_000


def test_a_route_compares_prompt_tokens() -> None:
    routes = config(f"{SMALLEST}\nroutes: [{{when: {{prompt_tokens: '>= 32K'}}, policy: random}}]").routes
    assert routes[0].when.prompt_tokens == (">=", 32_000)


def test_a_route_without_conditions_takes_everything() -> None:
    when = config(f"{SMALLEST}\nroutes: [{{policy: random}}]").routes[0].when
    assert (when.model, when.header, when.prompt_tokens) == (None, {}, None)


def test_any_model_can_be_routed_where_the_instances_name_the_models() -> None:
    assert config(f"{SMALLEST}\nroutes: [{{when: {{model: llama}}, policy: random}}]").routes[0].when.model == "llama"


# Cost


def cost(text: str, from_folder: float | None = None) -> CostParameters:
    settings = model(text)
    return settings.cost_parameters(settings.instances[0], from_folder)


def test_costs_are_the_cost_models_defaults() -> None:
    assert cost("instances: ['http://a:1']") == CostParameters()


def test_an_instances_own_cost_wins_over_the_models_field_by_field() -> None:
    found = cost(
        "cost: {network: 5ms, overhead: 50ms, attention_s_per_token2: 2e-8}, "
        "instances: [{url: 'http://a:1', cost: {overhead: 10ms, prefill_tokens_per_s: 2K}}]"
    )
    assert found == CostParameters(
        network_s=0.005, overhead_s=0.01, prefill_tokens_per_s=2000, attention_s_per_token2=2e-8
    )


def test_kv_bytes_come_from_the_configuration_else_the_models_folder_else_the_default() -> None:
    assert cost("kv_bytes_per_token: 128KiB, instances: ['http://a:1']", 100).kv_bytes_per_token == 131072
    assert cost("instances: ['http://a:1']", 100).kv_bytes_per_token == 100
    assert cost("instances: ['http://a:1']").kv_bytes_per_token == CostParameters().kv_bytes_per_token


POOL = "pool: {name: flash, bandwidth: 9.6GB/s, latency: 200ms, chunk_tokens: 128}"


def test_an_instance_reads_the_models_pool() -> None:
    found = cost(f"{POOL}, instances: ['http://a:1']")
    assert (found.pool_bytes_per_s, found.pool_latency_s, found.pool_chunk_tokens) == (9.6e9, 0.2, 128)


def test_an_instance_without_the_pool_has_no_bandwidth_to_it() -> None:
    assert cost(f"{POOL}, instances: [{{url: 'http://a:1', pool: false}}]").pool_bytes_per_s == 0
