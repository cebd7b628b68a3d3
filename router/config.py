"""The configuration: YAML in, validated and frozen settings out, or every fault with its file, line and field."""

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)

from kvroute.config_units import Address, Bytes, BytesPerSecond, Count, Seconds
from kvroute.config_yaml import Document, Problem, field_name, load_document
from kvroute.cost.model import CostParameters
from kvroute.policies.registry import BUILT_IN


class ConfigError(Exception):
    """A configuration that can't be used; `problems` are all that is wrong with it."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _http_url(value: str) -> str:
    if not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", value):
        raise ValueError("must be an http:// or https:// URL, such as http://10.0.0.1:8000")
    return value.rstrip("/")


HttpUrl = Annotated[str, AfterValidator(_http_url)]


class ServerSettings(_Section):
    listen: Address = ("0.0.0.0", 8000)
    admin: Address | None = ("127.0.0.1", 8001)
    max_body: Bytes = 64 * 1024**2
    max_header: Bytes = 64 * 1024
    header_timeout: Annotated[Seconds, Field(gt=0)] = 10.0
    decision_headers: Literal["on_request", "always", "never"] = "on_request"
    drain_timeout: Seconds = 30.0


class IndexSettings(_Section):
    url: Annotated[str, Field(pattern=r"^(redis|rediss|unix)://")] | None = None
    timeout: Annotated[Seconds, Field(gt=0)] = 0.05
    ttl: Annotated[Seconds, Field(gt=0)] = 3600.0
    prefix: str = "kvroute:"


class TelemetrySettings(_Section):
    request_log: str = "stderr"


class RelaySettings(_Section):
    connect_timeout: Annotated[Seconds, Field(gt=0)] = 2.0
    first_byte_timeout: Annotated[Seconds, Field(gt=0)] = 600.0
    idle_timeout: Annotated[Seconds, Field(gt=0)] = 300.0
    retries: Annotated[int, Field(ge=0, le=10)] = 2


class HealthSettings(_Section):
    interval: Annotated[Seconds, Field(gt=0)] = 2.0
    timeout: Annotated[Seconds, Field(gt=0)] = 2.0
    unhealthy_after: Annotated[int, Field(ge=1)] = 2
    metrics: bool = True


class PoolSettings(_Section):
    name: Annotated[str, Field(min_length=1)]
    layout: Literal["lmcache-fs", "vllm-fs", "hicache-file"] = "lmcache-fs"
    path: str | None = None
    bandwidth: Annotated[BytesPerSecond, Field(gt=0)] = 5e9
    latency: Seconds = 0.3
    chunk_tokens: Annotated[int, Field(ge=1)] = 256


class CostSettings(_Section):
    """Priors; what is not given is taken from the model, then from the default."""

    network: Seconds | None = None
    overhead: Seconds | None = None
    prefill_tokens_per_s: Annotated[float, Field(gt=0)] | None = None
    attention_s_per_token2: Annotated[float, Field(ge=0)] | None = None


class InstanceSettings(_Section):
    url: HttpUrl
    id: Annotated[str, Field(pattern=r"^[!-.0-~]+$")] = ""
    kv_tokens: Annotated[Count, Field(gt=0)] | None = None
    pool: bool = True
    cost: CostSettings = CostSettings()

    @property
    def name(self) -> str:
        """The configured id, else the URL without its scheme."""
        return self.id or self.url.partition("://")[2].replace("/", "|")


def _instance(value: Any) -> Any:
    return {"url": value} if isinstance(value, str) else value


class ModelSettings(_Section):
    tokenizer: Path | None = None
    chat_template: Path | None = None
    block_tokens: Annotated[int, Field(ge=16, le=1024)] = 64
    kv_bytes_per_token: Literal["auto"] | Annotated[Bytes, Field(gt=0)] = "auto"
    pool: PoolSettings | None = None
    instances: Annotated[tuple[Annotated[InstanceSettings, BeforeValidator(_instance)], ...], Field(min_length=1)]
    policy: str = "min_prefill"
    cost: CostSettings = CostSettings()

    def cost_parameters(self, instance: InstanceSettings, kv_bytes_per_token: float | None) -> CostParameters:
        """What is believed of `instance`; `kv_bytes_per_token` where the model's folder tells it, else None."""
        given: dict[str, Any] = {}
        for settings in (self.cost, instance.cost):
            given |= {key: value for key, value in settings.model_dump().items() if value is not None}
        names = {"network": "network_s", "overhead": "overhead_s"}
        fields = {names.get(key, key): value for key, value in given.items()}
        if self.kv_bytes_per_token != "auto":
            fields["kv_bytes_per_token"] = float(self.kv_bytes_per_token)
        elif kv_bytes_per_token is not None:
            fields["kv_bytes_per_token"] = kv_bytes_per_token
        if self.pool is not None and instance.pool:
            fields["pool_bytes_per_s"] = self.pool.bandwidth
            fields["pool_latency_s"] = self.pool.latency
            fields["pool_chunk_tokens"] = self.pool.chunk_tokens
        return CostParameters(**fields)


class PolicySettings(_Section):
    use: str
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")


def _comparison(value: object) -> tuple[str, int]:
    found = re.fullmatch(r"\s*(<=|>=|==|<|>)\s*(\d+)\s*", value) if isinstance(value, str) else None
    if found is None:
        raise ValueError('must be a comparison, such as ">= 32768"')
    return found[1], int(found[2])


class RouteCondition(_Section):
    model: str | None = None
    header: dict[str, str] = Field(default_factory=dict)
    prompt_tokens: Annotated[tuple[str, int], BeforeValidator(_comparison)] | None = None


class RouteSettings(_Section):
    when: RouteCondition = RouteCondition()
    policy: str


class Config(_Section):
    server: ServerSettings = ServerSettings()
    index: IndexSettings = IndexSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    relay: RelaySettings = RelaySettings()
    health: HealthSettings = HealthSettings()
    models: Annotated[dict[str, ModelSettings], Field(min_length=1)]
    policies: dict[str, PolicySettings] = Field(default_factory=dict)
    routes: tuple[RouteSettings, ...] = ()


PolicyKinds = Mapping[str, type]


def load_config(path: Path, environ: Mapping[str, str], kinds: PolicyKinds = BUILT_IN) -> Config:
    """Raises ConfigError, also for a file that can't be read."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError([Problem(str(path), 0, "", f"can't be read: {reason}")]) from error
    return parse_config(text, str(path), environ, kinds)


def parse_config(text: str, file: str, environ: Mapping[str, str], kinds: PolicyKinds = BUILT_IN) -> Config:
    """`kinds`: policy classes by the name that `use:` takes. Raises ConfigError with all problems at once."""
    document = load_document(text, file, environ)
    if document.problems:
        raise ConfigError(document.problems)
    if not isinstance(document.value, dict):
        raise ConfigError([Problem(file, 1, "", "must be a mapping with at least `models`")])
    try:
        config = Config.model_validate(document.value)
    except ValidationError as error:
        raise ConfigError(_problems(error, document, file)) from None
    problems = [
        Problem(file, document.line_of(path), field_name(path), reason)
        for path, reason in _contradictions(config, kinds)
    ]
    if problems:
        raise ConfigError(problems)
    return config


def config_for_instances(
    urls: Sequence[str],
    *,
    listen: str | None = None,
    admin: str | None = None,
    tokenizer: str | None = None,
    policy: str | None = None,
    redis: str | None = None,
) -> Config:
    """The configuration of `kvroute serve --instance URL...`: one fleet for whatever models its instances list.

    Raises ConfigError that speaks of "command line".
    """
    model: dict[str, Any] = {"instances": list(urls)}
    if tokenizer:
        model["tokenizer"] = tokenizer
    if policy:
        model["policy"] = policy
    server = {key: value for key, value in (("listen", listen), ("admin", admin)) if value}
    values = {"server": server, "models": {"*": model}, "index": {"url": redis} if redis else {}}
    file = "command line"
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_problems(error, Document(values), file)) from None
    problems = [Problem(file, 1, field_name(path), reason) for path, reason in _contradictions(config, BUILT_IN)]
    if problems:
        raise ConfigError(problems)
    return config


def build_policy(settings: PolicySettings, kinds: PolicyKinds) -> Any:
    """The policy object that `settings` describe. Raises pydantic's ValidationError, KeyError for an unknown kind."""
    kind = kinds[settings.use]
    return TypeAdapter(kind, config=None).validate_python(settings.with_) if settings.with_ else kind()


def _contradictions(config: Config, kinds: PolicyKinds) -> list[tuple[tuple[str | int, ...], str]]:
    """What no field alone can show: (path, reason)."""
    found: list[tuple[tuple[str | int, ...], str]] = []
    server = config.server
    if server.admin is not None and server.admin == server.listen and server.listen[1] != 0:
        found.append((("server", "admin"), "must differ from server.listen"))
    for name, policy in config.policies.items():
        if policy.use not in kinds:
            found.append(
                (("policies", name, "use"), f"unknown policy kind {policy.use!r}{_nearest(policy.use, kinds)}")
            )
            continue
        known = [each.name for each in dataclasses.fields(kinds[policy.use]) if each.init]
        unknown = [key for key in policy.with_ if key not in known]
        found += [
            (("policies", name, "with", key), f"{policy.use} has no parameter {key!r}{_nearest(key, known)}")
            for key in unknown
        ]
        if not unknown:
            try:
                build_policy(policy, kinds)
            except ValidationError as error:
                found += [(("policies", name, "with", *each["loc"]), _reason(each["msg"])) for each in error.errors()]
    names = {*kinds, *config.policies}
    urls: dict[str, tuple[str, str]] = {}
    for name, model in config.models.items():
        path = ("models", name)
        if model.policy not in names:
            found.append(((*path, "policy"), f"unknown policy {model.policy!r}{_nearest(model.policy, names)}"))
        if model.chat_template is not None and model.tokenizer is None:
            found.append(((*path, "chat_template"), "needs a tokenizer as well"))
        for position, instance in enumerate(model.instances):
            here = (*path, "instances", position)
            first = urls.setdefault(instance.name, (name, instance.url))
            if first[0] == name and instance.name in [each.name for each in model.instances[:position]]:
                found.append((here, f"the id {instance.name!r} is given twice"))
            elif first[1] != instance.url:
                found.append((here, f"the id {instance.name!r} stands for {first[1]} under model {first[0]!r}"))
    for position, route in enumerate(config.routes):
        if route.policy not in names:
            path = ("routes", position, "policy")  # type: ignore[assignment]
            found.append((path, f"unknown policy {route.policy!r}{_nearest(route.policy, names)}"))
    return found


def _problems(error: ValidationError, document: Document, file: str) -> list[Problem]:
    problems = []
    for each in error.errors():
        # Steps that are pydantic's own, such as the branch of a union, are not in the document.
        path: tuple[str | int, ...] = ()
        value = document.value
        for step in each["loc"]:
            try:
                value = value[step]
            except (LookupError, TypeError):
                if each["type"] != "missing" or step != each["loc"][-1]:
                    continue
            path = (*path, step)
        reason = _reason(each["msg"])
        if each["type"] == "extra_forbidden":
            reason = f"unknown field{_nearest(str(each['loc'][-1]), _fields_at(each['loc'][:-1]))}"
        elif each["type"] == "missing":
            reason = "is missing"
        problem = Problem(file, document.line_of(path), field_name(path), reason)
        if problem not in problems:
            problems.append(problem)
    return problems


def _reason(message: str) -> str:
    message = message.removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _fields_at(location: tuple[str | int, ...]) -> list[str]:
    """The names of the section at a pydantic location."""
    by_name: dict[str, type[BaseModel]] = {
        "server": ServerSettings,
        "index": IndexSettings,
        "telemetry": TelemetrySettings,
        "relay": RelaySettings,
        "health": HealthSettings,
        "pool": PoolSettings,
        "cost": CostSettings,
        "when": RouteCondition,
    }
    section: Any = Config
    words = [step for step in location if isinstance(step, str)]
    if words:
        if words[-1] in by_name and (len(words) == 1 or words[0] not in ("models", "policies") or len(words) > 2):
            section = by_name[words[-1]]
        elif "instances" in words[2:]:
            section = InstanceSettings
        else:
            section = {"models": ModelSettings, "policies": PolicySettings, "routes": RouteSettings}.get(
                words[0], Config
            )
    fields: Mapping[str, Any] = section.model_fields
    return [each.alias or name for name, each in fields.items()]


def _nearest(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
