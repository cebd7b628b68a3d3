"""What `kvroute check` prints: a configuration as it was understood."""

import re

from kvroute.config import Config, IndexSettings, InstanceSettings, ModelSettings, PoolSettings, RouteSettings


def describe(config: Config, file: str) -> str:
    """A readable summary. Passwords in URLs are masked."""
    server, relay, health = config.server, config.relay, config.health
    lines = [
        f"{file}: in order",
        f"listen     {_address(server.listen)}, admin {_address(server.admin) if server.admin else 'off'}",
        f"limits     body {server.max_body} bytes, head {server.max_header} bytes within {server.header_timeout:g} s",
        f"answers    tell the decision {server.decision_headers.replace('_', ' ')}; "
        f"{server.drain_timeout:g} s to finish them at shutdown",
        f"index      {_index(config.index)}",
        f"relay      connect {relay.connect_timeout:g} s, first byte {relay.first_byte_timeout:g} s, "
        f"idle {relay.idle_timeout:g} s, {relay.retries} retries",
        f"health     every {health.interval:g} s within {health.timeout:g} s, down after {health.unhealthy_after} "
        f"failures, load from /metrics {'on' if health.metrics else 'off'}",
        f"requests   logged to {config.telemetry.request_log}",
    ]
    for name, model in config.models.items():
        lines += _model(name, model)
    for name, policy in config.policies.items():
        parameters = ", ".join(f"{key}={value}" for key, value in policy.with_.items()) or "defaults"
        lines.append(f"policy     {name}: {policy.use} with {parameters}")
    lines += [f"route      {_conditions(route)} -> {route.policy}" for route in config.routes]
    return "\n".join(lines)


def masked(url: str) -> str:
    """`url` with *** for its password, be it before the host or, as redis-py allows, in the query."""
    url = re.sub(r"(://[^:@]*):.*@", r"\1:***@", url)
    return re.sub(r"([?&]password=)[^&]*", r"\1***", url)


def _index(index: IndexSettings) -> str:
    life = f"own history counts for {index.ttl:g} s"
    if index.url is None:
        return f"in memory; {life}"
    place = f"{masked(index.url)}, keys {index.prefix}*"
    return f"{place}, waited for at most {index.timeout * 1e3:g} ms; {life}"


def _model(name: str, model: ModelSettings) -> list[str]:
    title = "every model that these instances list" if name == "*" else name
    blocks = f"blocks of {model.block_tokens} tokens"
    if model.tokenizer is None:
        grade = f"{blocks}, estimated from text (no tokenizer)"
    else:
        grade = f"{blocks} of {model.tokenizer}"
    if model.chat_template is not None:
        grade += f", template {model.chat_template}"
    lines = [f"model      {title}: policy {model.policy}, {grade}", f"  KV       {_kv(model)}"]
    if model.pool is not None:
        lines.append(f"  pool     {_pool(model.pool)}")
    return lines + [_instance(model, each) for each in model.instances]


def _kv(model: ModelSettings) -> str:
    if model.kv_bytes_per_token != "auto":
        return f"{model.kv_bytes_per_token} bytes a token"
    default = f"{model.cost_parameters(model.instances[0], None).kv_bytes_per_token:g} bytes a token"
    return default if model.tokenizer is None else f"as the tokenizer folder's config.json tells, else {default}"


def _pool(pool: PoolSettings) -> str:
    place = f"{pool.layout} at {pool.path}" if pool.path else pool.layout
    speed = f"{pool.bandwidth / 1e9:g} GB/s after {pool.latency:g} s"
    return f"{pool.name}: {place}, {speed}, chunks of {pool.chunk_tokens} tokens"


def _instance(model: ModelSettings, instance: InstanceSettings) -> str:
    cost = model.cost_parameters(instance, None)
    parts = [f"{cost.prefill_tokens_per_s:g} prompt tokens/s"]
    if instance.kv_tokens:
        parts.append(f"{instance.kv_tokens} KV tokens")
    if model.pool is not None and not instance.pool:
        parts.append("without the pool")
    return f"  instance {instance.name} at {instance.url}: {', '.join(parts)}"


def _conditions(route: RouteSettings) -> str:
    when = route.when
    conditions = [f"model {when.model}"] if when.model else []
    conditions += [f"header {key}: {value}" for key, value in when.header.items()]
    if when.prompt_tokens:
        conditions.append(f"prompt tokens {when.prompt_tokens[0]} {when.prompt_tokens[1]}")
    return " and ".join(conditions) or "everything"


def _address(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
