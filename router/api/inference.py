"""A request's whole way: read, decide, relay, learn; and what becomes of it when something fails on that way.

Until the first byte of an answer, a failed attempt is repeated on another instance. From then on the error is the
client's: an event in a stream, a cut connection where a length was promised.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from enum import StrEnum
from random import getrandbits

from kvroute.api.body import (
    ClientGone,
    check_declared_size,
    model_name,
    parse_object,
    passthrough_fields,
    read_body,
)
from kvroute.api.errors import ApiError, bad_request, error_body, unavailable, unknown_model, unknown_route
from kvroute.api.types import Receive, Scope, Send
from kvroute.fleet.instance import Instance
from kvroute.prompt.reader import PromptKind
from kvroute.prompt.types import Grade, Prompt
from kvroute.relay.connection import Answer
from kvroute.relay.headers import end_to_end
from kvroute.relay.sse import SseScanner
from kvroute.relay.types import (
    AnswerBroken,
    ConnectError,
    FirstByteTimeout,
    Headers,
    UpstreamError,
)
from kvroute.relay.upstream import Upstream
from kvroute.relay.usage import JsonTail, Usage
from kvroute.routing.catalog import Catalog
from kvroute.routing.decision import Decision, NamedPolicy, ServedModel
from kvroute.routing.router import NoInstance, Router
from kvroute.routing.rules import PolicyTable
from kvroute.sources.history import History
from kvroute.telemetry.metrics import Metrics
from kvroute.telemetry.request_log import Attempt, RequestLog, RequestRecord

log = logging.getLogger("kvroute")

OFFLOAD_BYTES = 32 * 1024
"""Bodies from this size on are tokenized in a thread, so that one long prompt does not hold up others' streams."""

UNKNOWN_BLOCK_TOKENS = 256
"""Taken for an engine's block size until it has told its own: larger than any in use, so that rounding is no lie."""

# Of the client's request: replaced by the relay or by the gateway. Answers come uncompressed, since they are looked at.
_NOT_FORWARDED = frozenset({b"host", b"content-length", b"expect", b"accept-encoding", b"x-request-id"})
# Of the engine's answer: the gateway puts its own.
_NOT_RETURNED = frozenset({b"x-request-id"})

_PROMPT_KINDS: Mapping[str, PromptKind] = {
    "/v1/chat/completions": PromptKind.CHAT,
    "/v1/completions": PromptKind.COMPLETIONS,
}


class DecisionHeaders(StrEnum):
    """When answers carry x-kvroute-instance, -reason, -cached-tokens and -estimate-ms."""

    ON_REQUEST = "on_request"
    """When the request has a header `x-kvroute-debug`."""
    ALWAYS = "always"
    NEVER = "never"


# An enumeration's members are slow to reach by name, and these are looked at in every request.
_ALWAYS, _NEVER = DecisionHeaders.ALWAYS, DecisionHeaders.NEVER
_OTHER = PromptKind.OTHER


@dataclass(frozen=True, slots=True)
class InferenceSettings:
    max_body: int
    """Bytes."""
    retries: int
    """Further attempts after the first."""
    decision_headers: DecisionHeaders


@dataclass(frozen=True, slots=True, eq=False)
class Inference:
    """Serves every route that an instance answers."""

    settings: InferenceSettings
    catalog: Catalog
    policies: PolicyTable
    router: Router
    upstreams: Mapping[str, Upstream]
    """By instance id."""
    history: History
    metrics: Metrics
    request_log: RequestLog
    executor: Executor
    """Runs the tokenizing of long prompts."""
    instance_failed: Callable[[Instance, str], None]
    """Told of instances that could not be connected to."""
    clock: Callable[[], float]
    wall_clock: Callable[[], float]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _Handling(self, scope, receive, send).run()


class _Handling:
    """One request under way."""

    __slots__ = (
        "debug",
        "decision",
        "gateway",
        "headers",
        "metered_model",
        "receive",
        "record",
        "scope",
        "send",
        "started",
        "started_answer",
    )

    def __init__(self, gateway: Inference, scope: Scope, receive: Receive, send: Send) -> None:
        self.gateway = gateway
        self.scope = scope
        self.receive = receive
        self.send = send
        self.started = gateway.clock()
        self.started_answer = False
        self.decision: Decision | None = None
        self.metered_model = ""
        self.headers: Headers = scope["headers"]
        request_id = ""
        self.debug = gateway.settings.decision_headers is _ALWAYS
        for name, value in self.headers:
            if name == b"x-request-id":
                request_id = value.decode("latin-1")
            elif name == b"x-kvroute-debug":
                self.debug = gateway.settings.decision_headers is not _NEVER
        if not request_id or len(request_id) > 128 or not request_id.isprintable():
            request_id = f"{getrandbits(128):032x}"
        self.record = RequestRecord(
            time=gateway.wall_clock(), request_id=request_id, method=scope["method"], path=scope["path"]
        )

    async def run(self) -> None:
        record = self.record
        try:
            await self._serve()
        except ApiError as error:
            record.outcome = record.outcome or "refused"
            await self._refuse(error)
        except (ClientGone, asyncio.CancelledError):
            # The connection is gone, so nobody is left to be told; what ran for it has been cancelled on the way here.
            record.outcome = "client_gone"
            if self.decision is not None and record.ttft_ms is None:
                # The engine stops before the prompt is computed.
                await self._retract(self.decision)
        except Exception:
            log.exception("request %s: a fault of the gateway", record.request_id)
            record.outcome = "refused"
            await self._refuse(ApiError(500, "The gateway failed.", code="internal_error", kind="server_error"))
        finally:
            self._finish()

    def _finish(self) -> None:
        record = self.record
        now = self.gateway.clock()
        if self.decision is not None:
            self.decision.ticket.finish(now)
        record.duration_ms = (now - self.started) * 1e3
        self.gateway.metrics.finished(self.metered_model, record.status, record.outcome)
        self.gateway.request_log.add(record)

    async def _refuse(self, error: ApiError) -> None:
        self.record.error = error.message
        if self.started_answer:
            self.scope["extensions"]["kvroute.abort"]()
            return
        self.record.status = error.status
        body = error.body()
        headers = [
            *error.headers(),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", self.record.request_id.encode("latin-1")),
        ]
        await self.send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def _serve(self) -> None:
        gateway = self.gateway
        record = self.record
        check_declared_size(self.scope, gateway.settings.max_body)
        body = await read_body(self.receive, gateway.settings.max_body)
        kind = _PROMPT_KINDS.get(self.scope["path"], _OTHER)
        if kind is not _OTHER:
            if self.scope["method"] != "POST":
                raise ApiError(405, f"{self.scope['path']} takes POST.", code="method_not_allowed")
            fields: Mapping[str, object] = parse_object(body)
        else:
            fields = passthrough_fields(self.scope, body)
        name = model_name(fields) or gateway.catalog.only_name()
        model = None if name is None else gateway.catalog.resolve(name)
        if name is None or model is None:
            if not gateway.catalog.complete():
                raise unavailable("Not all instances have listed their models yet; this one may be among them.")
            if name is not None:
                raise unknown_model(name)
            if kind is _OTHER:
                raise unknown_route(record.method, record.path)
            raise bad_request("You must provide a `model`.", param="model")
        record.model = self.metered_model = name
        record.stream = fields.get("stream") is True
        prompt = await self._read_prompt(model, kind, name, fields, len(body))
        record.grade = prompt.grade
        record.prompt_tokens = prompt.tokens
        policy = gateway.policies.select(model, name, self.headers, prompt.tokens)
        answer, first = await self._answer(model, name, prompt, policy, body)
        await self._relay(answer, first)

    async def _read_prompt(
        self, model: ServedModel, kind: PromptKind, name: str, fields: Mapping[str, object], body_bytes: int
    ) -> Prompt:
        reader = model.reader
        if body_bytes < OFFLOAD_BYTES or reader.tokenizer is None:
            return reader.read(kind, name, fields)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.gateway.executor, reader.read, kind, name, fields)

    async def _answer(
        self, model: ServedModel, name: str, prompt: Prompt, policy: NamedPolicy, body: bytes
    ) -> tuple[Answer, bytes]:
        """An instance's answer and the first bytes of its body, after as many attempts as it takes and the settings
        allow. An engine sends the head of a stream before its prefill, so only a byte of the body shows that the
        instance is at work; until then nothing has been sent to the client, and another instance can be asked.
        """
        gateway = self.gateway
        record = self.record
        scope = self.scope
        method = scope["method"].encode("ascii")
        target: bytes = scope["raw_path"]
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        headers = [
            header
            for header in end_to_end(self.headers, drop=_NOT_FORWARDED)
            if not header[0].startswith(b"x-kvroute-")
        ]
        headers.append((b"x-request-id", record.request_id.encode("latin-1")))
        failed: set[str] = set()
        last_error: UpstreamError | None = None
        for attempt in range(gateway.settings.retries + 1):
            try:
                decision = await gateway.router.decide(
                    model, name, prompt, policy, streaming=record.stream, exclude=failed
                )
            except NoInstance:
                break
            self.decision = decision
            self._note_decision(decision, first=attempt == 0)
            await self._dispatched(decision)
            try:
                answer = await gateway.upstreams[decision.instance.id].send(method, target, headers, body)
                first = await answer.read()
            except UpstreamError as error:
                last_error = error
                await self._attempt_failed(decision, f"{type(error).__name__}: {error}", type(error).__name__)
                if isinstance(error, ConnectError):
                    gateway.instance_failed(decision.instance, str(error))
                failed.add(decision.instance.id)
                continue
            if answer.status == 503 and attempt < gateway.settings.retries:
                others = model.fleet.candidates(failed | {decision.instance.id}, name)
                if others:
                    # The engine says that it can't take the request now; another one may.
                    answer.abort()
                    await self._attempt_failed(decision, "answered 503", "Status503")
                    failed.add(decision.instance.id)
                    continue
            return answer, first
        if last_error is None and not failed:
            raise unavailable(f"No instance of `{name}` can be asked.")
        if isinstance(last_error, FirstByteTimeout):
            raise unavailable(
                f"No instance began to answer in time ({len(failed)} tried).", status=504, code="upstream_timeout"
            )
        raise unavailable(
            f"No instance could be reached ({len(failed)} tried).", status=502, code="upstream_unreachable"
        )

    def _note_decision(self, decision: Decision, *, first: bool) -> None:
        record = self.record
        chosen = decision.chosen
        record.instance = decision.instance.id
        record.policy = decision.policy
        record.reason = decision.reason
        record.predicted_cached_tokens = chosen.cached_tokens
        record.predicted_ttft_ms = chosen.ttft_s * 1e3
        record.wait_ms = chosen.wait_s * 1e3
        record.read_ms = chosen.read_s * 1e3
        record.prefill_ms = chosen.prefill_s * 1e3
        if first:
            seconds = self.gateway.clock() - self.started
            record.decide_ms = seconds * 1e3
            self.gateway.metrics.decided(self.metered_model, decision.policy, decision.reason, seconds)

    async def _dispatched(self, decision: Decision) -> None:
        """Record the prompt where it goes now, and not only once it is answered: a sibling that arrives meanwhile finds
        it there, behind the same prefill. A failed attempt takes it back."""
        prompt = decision.prompt
        if prompt.hashes:
            kv_tokens = decision.placement.kv_tokens or decision.instance.load.kv_tokens
            capacity = kv_tokens // prompt.block_tokens if kv_tokens else None
            await self.gateway.history.dispatched(
                decision.placement.gpu, prompt.hashes, self.gateway.wall_clock(), capacity
            )

    async def _attempt_failed(self, decision: Decision, error: str, kind: str) -> None:
        gateway = self.gateway
        decision.ticket.finish(gateway.clock())
        await self._retract(decision)
        gateway.metrics.attempt_failed(decision.instance.id, kind)
        # A fresh list: the record's default one is shared.
        self.record.failed_attempts = [*self.record.failed_attempts, Attempt(decision.instance.id, error)]

    async def _retract(self, decision: Decision) -> None:
        if decision.prompt.hashes:
            await self.gateway.history.retracted(decision.placement.gpu, decision.prompt.hashes, decision.predicted)

    async def _relay(self, answer: Answer, first: bytes) -> None:
        """Pass the answer on as it comes. An answer that is not read to its end is aborted, whatever the reason."""
        try:
            await self._start_answer(answer)
            if _is_event_stream(answer.headers):
                usage = await self._relay_events(answer, first)
            else:
                usage = await self._relay_body(answer, first)
        except BaseException:
            answer.abort()
            raise
        await self._answered(answer, usage)

    async def _start_answer(self, answer: Answer) -> None:
        record = self.record
        record.status = answer.status
        record.outcome = "ok" if answer.status < 400 else "engine_error"
        headers = [header for header in answer.headers if header[0] not in _NOT_RETURNED]
        headers.append((b"x-request-id", record.request_id.encode("latin-1")))
        if self.debug and self.decision is not None:
            headers += _decision_headers(self.decision)
        self.started_answer = True
        await self.send({"type": "http.response.start", "status": answer.status, "headers": headers})

    async def _relay_body(self, answer: Answer, data: bytes) -> Usage | None:
        tail = JsonTail()
        send = self.send
        self._first_byte()
        while not answer.ended:
            tail.feed(data)
            await send({"type": "http.response.body", "body": data, "more_body": True})
            try:
                data = await answer.read()
            except AnswerBroken as error:
                self._broke_off(error)
                # The client was promised a length or a last chunk; cut off, it can tell that this is not all.
                self.scope["extensions"]["kvroute.abort"]()
                return None
        tail.feed(data)
        await send({"type": "http.response.body", "body": data, "more_body": False})
        return tail.usage()

    async def _relay_events(self, answer: Answer, data: bytes) -> Usage | None:
        scanner = SseScanner()
        send = self.send
        waiting_for_token = True
        while data:
            whole = scanner.feed(data)
            if waiting_for_token and scanner.first_token:
                waiting_for_token = False
                self._first_token()
            if whole:
                await send({"type": "http.response.body", "body": whole, "more_body": True})
            try:
                data = await answer.read()
            except AnswerBroken as error:
                if scanner.done:
                    break
                self._broke_off(error)
                event = error_body(f"The answer broke off: {error}.", "server_error", None, "stream_broken")
                await send(
                    {
                        "type": "http.response.body",
                        "body": b"data: " + event + b"\n\ndata: [DONE]\n\n",
                        "more_body": False,
                    }
                )
                return scanner.usage
        await send({"type": "http.response.body", "body": scanner.flush(), "more_body": False})
        if scanner.error:
            # The engine had begun with a 200 before it failed, and has said so in the stream.
            self.record.outcome = "engine_error"
        return scanner.usage

    def _broke_off(self, error: AnswerBroken) -> None:
        self.record.outcome = "broken"
        self.record.error = f"{type(error).__name__}: {error}"

    def _first_token(self) -> None:
        gateway = self.gateway
        decision = self.decision
        assert decision is not None
        now = gateway.clock()
        decision.ticket.first_token(now)
        seconds = now - self.started
        self.record.ttft_ms = seconds * 1e3
        predicted = decision.predicted_ttft_s if not self.record.failed_attempts else None
        gateway.metrics.first_token(self.metered_model, decision.instance.id, seconds, predicted)

    def _first_byte(self) -> None:
        """Of an answer that is not streamed."""
        gateway = self.gateway
        decision = self.decision
        assert decision is not None
        now = gateway.clock()
        decision.ticket.first_token(now)
        self.record.ttft_ms = (now - self.started) * 1e3
        if self.record.outcome == "ok":
            gateway.metrics.first_token(self.metered_model, decision.instance.id, now - self.started, None)

    async def _answered(self, answer: Answer, usage: Usage | None) -> None:
        """Learn from an answer that came to its end."""
        gateway = self.gateway
        record = self.record
        decision = self.decision
        assert decision is not None
        if record.outcome != "ok":
            # Refused by the engine or failed in it, so as far as is known nothing was computed and nothing is cached.
            await self._retract(decision)
            return
        prompt = decision.prompt
        now = gateway.wall_clock()
        if prompt.hashes and decision.placement.pool is not None:
            await gateway.history.dispatched(decision.placement.pool, prompt.hashes, now)
        if usage is None:
            return
        record.completion_tokens = usage.completion_tokens
        if usage.prompt_tokens:
            record.prompt_tokens = usage.prompt_tokens
        record.cached_tokens = usage.cached_tokens
        gateway.metrics.tokens(
            self.metered_model,
            usage.prompt_tokens or prompt.tokens,
            decision.predicted_cached_tokens,
            usage.cached_tokens,
        )
        if usage.cached_tokens is None or not usage.prompt_tokens or prompt.grade is Grade.NONE:
            return
        # In our blocks: our count of tokens is an estimate for text, and the engine counts in whole blocks of its own.
        scale = prompt.tokens / usage.prompt_tokens
        rounding = decision.instance.load.block_tokens or UNKNOWN_BLOCK_TOKENS
        cached_blocks = int((usage.cached_tokens + rounding) * scale) // prompt.block_tokens
        await gateway.history.answered(decision.placement.gpu, prompt.hashes, decision.predicted, cached_blocks, now)


def _is_event_stream(headers: Headers) -> bool:
    """With a length promised no event could be added, so such a stream is passed on like any other body."""
    names = {name: value for name, value in headers if name in (b"content-type", b"content-length")}
    return b"content-length" not in names and names.get(b"content-type", b"").startswith(b"text/event-stream")


def _decision_headers(decision: Decision) -> Headers:
    return [
        (b"x-kvroute-instance", decision.instance.id.encode("latin-1", "replace")),
        (b"x-kvroute-reason", decision.reason.encode("latin-1", "replace")),
        (b"x-kvroute-cached-tokens", b"%d" % decision.predicted_cached_tokens),
        (b"x-kvroute-estimate-ms", b"%.1f" % (decision.predicted_ttft_s * 1e3)),
    ]
