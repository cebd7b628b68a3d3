"""What `kvroute check` prints: a configuration as it was understood."""

import re

from kvroute.config import Config, InstanceSettings, ModelSettings


def describe(config: Config, file: str) -> str:
    """A readable summary. Passwords in URLs are masked."""
    server, relay, health = config.server, config.relay, config.health
    lines = [
        f"{file}: in order",
        f"listen     {_address(server.listen)}, admin {_address(server.admin) if server.admin else 'off'}",
        f"limits     body {server.max_body} bytes, head {server.max_header} bytes within {server.header_timeout:g} s",
        f"index      {_index(config)}",
        f"relay      connect {relay.connect_timeout:g} s, first byte {relay.first_byte_timeout:g} s, "
        f"idle {relay.idle_timeout:g} s, {relay.retries} retries",
        f"health     every {health.interval:g} s, down after {health.unhealthy_after} failures, "
        f"load from /metrics {'on' if health.metrics else 'off'}",
        f"requests   logged to {config.telemetry.request_log}",
    ]
    for name, model in config.models.items():
        lines += _model(name, model)
    for name, policy in config.policies.items():
        parameters = ", ".join(f"{key}={value}" for key, value in policy.with_.items()) or "defaults"
        lines.append(f"policy     {name}: {policy.use} with {parameters}")
    for route in config.routes:
        when = route.when
        conditions = [f"model {when.model}"] if when.model else []
        conditions += [f"header {key}: {value}" for key, value in when.header.items()]
        if when.prompt_tokens:
            conditions.append(f"prompt tokens {when.prompt_tokens[0]} {when.prompt_tokens[1]}")
        lines.append(f"route      {' and '.join(conditions) or 'everything'} -> {route.policy}")
    return "\n".join(lines)


def _index(config: Config) -> str:
    index = config.index
    if index.url is None:
        return f"in memory; own history counts for {index.ttl:g} s"
    url = re.sub(r"(://[^:/@]*:)[^@]*@", r"\1***@", index.url)
    return f"{url}, waited for at most {index.timeout * 1e3:g} ms; own history counts for {index.ttl:g} s"


def _model(name: str, model: ModelSettings) -> list[str]:
    title = "every model that these instances list" if name == "*" else name
    grade = f"tokens of {model.tokenizer}" if model.tokenizer else "text (no tokenizer: estimates)"
    lines = [f"model      {title}: policy {model.policy}, blocks of {model.block_tokens} {grade}"]
    if model.pool is not None:
        pool = model.pool
        lines.append(
            f"  pool     {pool.name}: {pool.layout}, {pool.bandwidth / 1e9:g} GB/s after {pool.latency:g} s, "
            f"chunks of {pool.chunk_tokens} tokens"
        )
    return lines + [_instance(model, each) for each in model.instances]


def _instance(model: ModelSettings, instance: InstanceSettings) -> str:
    cost = model.cost_parameters(instance, None)
    parts = [f"{cost.prefill_tokens_per_s:g} prompt tokens/s"]
    if instance.kv_tokens:
        parts.append(f"{instance.kv_tokens} KV tokens")
    if model.pool is not None and not instance.pool:
        parts.append("without the pool")
    return f"  instance {instance.name} at {instance.url}: {', '.join(parts)}"


def _address(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
