"""The configuration: YAML in, validated and frozen settings out, or every fault with its file, line and field.

docs/configuration.md is the reference of what the fields mean.
"""

from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from kvroute.config_policy import make_policy
from kvroute.config_problems import did_you_mean, reject_invalid
from kvroute.config_units import (
    Address,
    Bytes,
    BytesOrAuto,
    BytesPerSecond,
    Comparison,
    Count,
    HttpUrl,
    Name,
    Number,
    RedisUrl,
    Seconds,
)
from kvroute.config_yaml import Document, Problem, load_document
from kvroute.config_yaml import Path as FieldPath
from kvroute.cost.model import CostParameters
from kvroute.policies.registry import BUILT_IN

_Sized = TypeVar("_Sized", bound=Sized)

PolicyKinds = Mapping[str, type]
"""Policy dataclasses by the name that `use:` takes."""


class ConfigError(Exception):
    """A configuration that can't be used; `problems` are all that is wrong with it, and the text is theirs."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class _Known:
    """What names may refer to: pydantic's validation context. Without one, names are taken as they are."""

    kinds: PolicyKinds
    policies: frozenset[str]
    models: frozenset[str]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _null_is_empty(cls, value: Any) -> Any:
        return {} if value is None else value


def _known_policy(name: str, info: ValidationInfo) -> str:
    if info.context is not None and name not in info.context.policies:
        raise ValueError(f"unknown policy {name!r}{did_you_mean(name, info.context.policies)}")
    return name


def _known_kind(name: str, info: ValidationInfo) -> str:
    if info.context is not None and name not in info.context.kinds:
        raise ValueError(f"unknown policy kind {name!r}{did_you_mean(name, info.context.kinds)}")
    return name


def _not_empty(value: _Sized) -> _Sized:
    # Not pydantic's own bound: it does not count items that are invalid, and complains about them twice.
    if not value:
        raise ValueError("must not be empty")
    return value


# A mapping or list of which every line is commented out is an empty one.
NullIsEmptyMapping = BeforeValidator(lambda value: {} if value is None else value)
NullIsEmptyList = BeforeValidator(lambda value: [] if value is None else value)
Positive = Field(gt=0)
PolicyName = Annotated[str, AfterValidator(_known_policy)]


class ServerSettings(_Section):
    listen: Address = ("0.0.0.0", 8000)
    admin: Address | None = ("127.0.0.1", 8001)
    max_body: Annotated[Bytes, Positive] = 64 * 1024**2
    max_header: Annotated[Bytes, Positive] = 64 * 1024
    header_timeout: Annotated[Seconds, Positive] = 10.0
    decision_headers: Literal["on_request", "always", "never"] = "on_request"
    drain_timeout: Seconds = 30.0

    @field_validator("admin")
    @classmethod
    def _differs(cls, admin: tuple[str, int] | None, info: ValidationInfo) -> tuple[str, int] | None:
        if admin is not None and admin[1] != 0 and admin == info.data.get("listen"):
            raise ValueError("must differ from server.listen")
        return admin


class IndexSettings(_Section):
    url: RedisUrl | None = None
    timeout: Annotated[Seconds, Positive] = 0.05
    ttl: Annotated[Seconds, Positive] = 3600.0
    prefix: str = "kvroute:"


class TelemetrySettings(_Section):
    request_log: Annotated[str, Field(min_length=1)] = "stderr"


class RelaySettings(_Section):
    connect_timeout: Annotated[Seconds, Positive] = 2.0
    first_byte_timeout: Annotated[Seconds, Positive] = 600.0
    idle_timeout: Annotated[Seconds, Positive] = 300.0
    retries: Annotated[Count, Field(le=10)] = 2


class HealthSettings(_Section):
    interval: Annotated[Seconds, Positive] = 2.0
    timeout: Annotated[Seconds, Positive] = 2.0
    unhealthy_after: Annotated[Count, Positive] = 2
    metrics: bool = True


class PoolSettings(_Section):
    name: Name
    layout: Literal["lmcache-fs", "vllm-fs", "hicache-file"] = "lmcache-fs"
    path: Path | None = None
    bandwidth: Annotated[BytesPerSecond, Positive] = 5e9
    latency: Seconds = 0.3
    chunk_tokens: Annotated[Count, Positive] = 256


class CostSettings(_Section):
    """Priors; what is not given is taken from the model, then from the defaults of CostParameters."""

    network: Seconds | None = None
    overhead: Seconds | None = None
    prefill_tokens_per_s: Annotated[Number, Positive] | None = None
    attention_s_per_token2: Number | None = None


class InstanceSettings(_Section):
    url: HttpUrl
    id: Name | None = None
    kv_tokens: Annotated[Count, Positive] | None = None
    pool: bool = True
    cost: CostSettings = CostSettings()

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value

    @property
    def name(self) -> str:
        """The configured id, else the URL without its scheme."""
        return self.id or self.url.partition("://")[2].replace("/", "|")


class ModelSettings(_Section):
    tokenizer: Path | None = None
    chat_template: Path | None = None
    block_tokens: Annotated[Count, Field(ge=16, le=1024)] = 64
    kv_bytes_per_token: BytesOrAuto = "auto"
    pool: PoolSettings | None = None
    instances: Annotated[tuple[InstanceSettings, ...], AfterValidator(_not_empty)]
    policy: PolicyName = "min_prefill"
    cost: CostSettings = CostSettings()

    @field_validator("chat_template")
    @classmethod
    def _has_tokenizer(cls, template: Path | None, info: ValidationInfo) -> Path | None:
        if template is not None and info.data.get("tokenizer", template) is None:
            raise ValueError("needs a tokenizer as well")
        return template

    def cost_parameters(self, instance: InstanceSettings, kv_bytes_per_token: float | None) -> CostParameters:
        """What is believed of `instance`; `kv_bytes_per_token` where the model's folder tells it, else None."""
        given: dict[str, Any] = {}
        for settings in (self.cost, instance.cost):
            given |= settings.model_dump(exclude_none=True)
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
    use: Annotated[str, AfterValidator(_known_kind)]
    with_: Annotated[dict[str, Any], NullIsEmptyMapping] = Field(default_factory=dict, alias="with")

    @model_validator(mode="before")
    @classmethod
    def _given(cls, value: Any) -> Any:
        """Without parameters, too, the policy is asked whether it accepts them: it may need some."""
        return {"with": {}, **value} if isinstance(value, dict) else value

    @field_validator("with_")
    @classmethod
    def _accepted(cls, parameters: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        use = info.data.get("use")
        if info.context is not None and use is not None:
            make_policy(use, info.context.kinds[use], parameters)
        return parameters


class RouteCondition(_Section):
    model: str | None = None
    header: Annotated[dict[str, str], NullIsEmptyMapping] = Field(default_factory=dict)
    prompt_tokens: Comparison | None = None

    @field_validator("model")
    @classmethod
    def _served(cls, model: str | None, info: ValidationInfo) -> str | None:
        known = info.context
        if known is not None and model is not None and not {model, "*"} & known.models:
            raise ValueError(f"unknown model {model!r}{did_you_mean(model, known.models)}")
        return model


class RouteSettings(_Section):
    when: RouteCondition = RouteCondition()
    policy: PolicyName


class Config(_Section):
    server: ServerSettings = ServerSettings()
    index: IndexSettings = IndexSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    relay: RelaySettings = RelaySettings()
    health: HealthSettings = HealthSettings()
    models: Annotated[dict[Annotated[str, Field(min_length=1)], ModelSettings], AfterValidator(_not_empty)]
    policies: Annotated[dict[str, PolicySettings], NullIsEmptyMapping] = Field(default_factory=dict)
    routes: Annotated[tuple[RouteSettings, ...], NullIsEmptyList] = ()


def load_config(path: Path, environ: Mapping[str, str], kinds: PolicyKinds = BUILT_IN) -> Config:
    """Raises ConfigError, also for a file that can't be read."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError([Problem(str(path), 0, "", f"can't be read: {reason}")]) from error
    return parse_config(text, str(path), environ, kinds)


def parse_config(text: str, file: str, environ: Mapping[str, str], kinds: PolicyKinds = BUILT_IN) -> Config:
    """`file`: how problems are to name the text. Raises ConfigError with all problems, by line."""
    document = load_document(text, file, environ)
    if document.problems and document.value is None:
        raise ConfigError(document.problems)
    return _validated(document, kinds)


def config_for_instances(
    urls: Sequence[str],
    *,
    listen: str | None = None,
    admin: str | None = None,
    tokenizer: str | None = None,
    policy: str | None = None,
    redis: str | None = None,
    kinds: PolicyKinds = BUILT_IN,
) -> Config:
    """The configuration of `kvroute serve --instance URL...`: one fleet for whatever models its instances list.

    Raises ConfigError, whose problems name the option as the field.
    """
    options = {
        "--listen": (("server", "listen"), listen),
        "--admin": (("server", "admin"), admin),
        "--redis": (("index", "url"), redis),
        "--tokenizer": (("models", "*", "tokenizer"), tokenizer),
        "--policy": (("models", "*", "policy"), policy),
        "--instance": (("models", "*", "instances"), list(urls)),
    }
    values: dict[str, Any] = {}
    for path, value in options.values():
        if value is not None:
            section = values
            for step in path[:-1]:
                section = section.setdefault(step, {})
            section[path[-1]] = value
    try:
        return _validated(Document("command line", values), kinds)
    except ConfigError as error:
        names = {".".join(path): option for option, (path, _) in options.items()}
        problems = [replace(each, field=names.get(each.field.partition("[")[0], "")) for each in error.problems]
        raise ConfigError(problems) from None


def build_policy(settings: PolicySettings, kinds: PolicyKinds) -> Any:
    """The policy object that `settings`, as they were validated with `kinds`, describe."""
    return make_policy(settings.use, kinds[settings.use], settings.with_)


def _validated(document: Document, kinds: PolicyKinds) -> Config:
    values = document.value
    policies = {*kinds, *_mapping(_mapping(values).get("policies"))}
    models = _mapping(_mapping(values).get("models"))
    config = None
    try:
        config = Config.model_validate(values, context=_Known(kinds, frozenset(policies), frozenset(models)))
    except ValidationError as error:
        reject_invalid(document, error, Config)
    for path, reason in _repeated_instances(models):
        document.reject(path, reason)
    if config is None or document.problems:
        raise ConfigError(sorted(document.problems, key=lambda each: each.line))
    return config


def _repeated_instances(models: Mapping[str, Any]) -> Iterator[tuple[FieldPath, str]]:
    """Instances are known by their ids, over all models: an id means one URL, a URL has one id, and no model lists it
    twice. Takes unvalidated values, so that this is said along with whatever else is wrong."""
    by_id: dict[str, InstanceSettings] = {}
    by_url: dict[str, InstanceSettings] = {}
    for model, settings in models.items():
        listed: set[str] = set()
        instances = _mapping(settings).get("instances")
        for position, value in enumerate(instances if isinstance(instances, list) else ()):
            try:
                instance = _INSTANCE.validate_python(value)
            except ValidationError:
                continue
            path = ("models", model, "instances", position)
            same_id = by_id.setdefault(instance.name, instance)
            same_url = by_url.setdefault(instance.url, instance)
            if same_id.url != instance.url:
                yield path, f"the id {instance.name!r} stands for {same_id.url} already"
            elif same_url.name != instance.name:
                yield path, f"{instance.url} has the id {same_url.name!r} already"
            elif instance.name in listed:
                yield path, f"the instance {instance.name!r} is listed twice"
            listed.add(instance.name)


_INSTANCE = TypeAdapter(InstanceSettings)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
