"""The summary that `kvroute check` prints."""

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.config import parse_config
from kvroute.config_describe import describe, masked

EVERYTHING = """
server: {listen: "[::]:80", admin: null, max_body: 1MiB, decision_headers: always, drain_timeout: 1m}
index: {url: "rediss://gateway:s3cr3t@redis:6380/1", timeout: 20ms, ttl: 10m, prefix: "lab:"}
telemetry: {request_log: /var/log/kvroute.jsonl}
relay: {connect_timeout: 1s, first_byte_timeout: 5m, idle_timeout: 30s, retries: 3}
health: {interval: 5s, timeout: 1s, unhealthy_after: 4, metrics: false}
models:
  coder:
    tokenizer: /models/coder
    chat_template: coder.jinja
    block_tokens: 128
    policy: patient
    pool: {name: flash, path: /mnt/pool, bandwidth: 9.6GB/s}
    instances:
      - {url: "http://10.0.0.1:8000", id: a, kv_tokens: 500K, cost: {prefill_tokens_per_s: 4500}}
      - {url: "http://10.0.0.2:8000", pool: false}
  "*":
    kv_bytes_per_token: 64KiB
    instances: ["http://10.0.0.3:8000"]
policies:
  patient: {use: min_prefill, with: {tolerance_s: 0.02}}
routes:
  - when: {model: coder, header: {x-tier: batch}, prompt_tokens: "< 256"}
    policy: least_loaded
  - policy: patient
"""


def test_a_configuration_is_told_in_full() -> None:
    assert describe(parse_config(EVERYTHING, "lab.yaml", {}), "lab.yaml").split("\n") == [
        "lab.yaml: in order",
        "listen     [::]:80, admin off",
        "limits     body 1048576 bytes, head 65536 bytes within 10 s",
        "answers    tell the decision always; 60 s to finish them at shutdown",
        "index      rediss://gateway:***@redis:6380/1, keys lab:*, waited for at most 20 ms; "
        "own history counts for 600 s",
        "relay      connect 1 s, first byte 300 s, idle 30 s, 3 retries",
        "health     every 5 s within 1 s, down after 4 failures, load from /metrics off",
        "requests   logged to /var/log/kvroute.jsonl",
        "model      coder: policy patient, blocks of 128 tokens of /models/coder, template coder.jinja",
        "  KV       as the tokenizer folder's config.json tells, else 131072 bytes a token",
        "  pool     flash: lmcache-fs at /mnt/pool, 9.6 GB/s after 0.3 s, chunks of 256 tokens",
        "  instance a at http://10.0.0.1:8000: 4500 prompt tokens/s, 500000 KV tokens",
        "  instance 10.0.0.2:8000 at http://10.0.0.2:8000: 8000 prompt tokens/s, without the pool",
        "model      every model that these instances list: policy min_prefill, "
        "blocks of 64 tokens, estimated from text (no tokenizer)",
        "  KV       65536 bytes a token",
        "  instance 10.0.0.3:8000 at http://10.0.0.3:8000: 8000 prompt tokens/s",
        "policy     patient: min_prefill with tolerance_s=0.02",
        "route      model coder and header x-tier: batch and prompt tokens < 256 -> least_loaded",
        "route      everything -> patient",
    ]


def test_a_short_configuration_has_a_short_summary() -> None:
    text = describe(parse_config("models: {m: {instances: ['http://a:1']}}", "f.yaml", {}), "f.yaml")
    assert "index      in memory; own history counts for 3600 s" in text
    assert "policy     " not in text
    assert "route      " not in text


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("redis://user@h", "redis://user@h"),
        ("redis://:secret@h", "redis://:***@h"),
        ("rediss://user:se@cr/et@h:1/2", "rediss://user:***@h:1/2"),
        ("unix://user:secret@/run/redis.sock", "unix://user:***@/run/redis.sock"),
        ("redis://h?password=secret&db=1", "redis://h?password=***&db=1"),
    ],
)
def test_a_password_is_masked_wherever_it_stands(url: str, shown: str) -> None:
    assert masked(url) == shown


@given(st.text(min_size=1).map(lambda each: quote("~" + each, safe="@:!$'()*+,;=")))
def test_no_password_is_described(password: str) -> None:
    text = f"index: {{url: \"redis://user:{password}@h:1/0\"}}\nmodels: {{m: {{instances: ['http://a:1']}}}}"
    assert password not in describe(parse_config(text, "f.yaml", {}), "f.yaml")
