"""An engine's load, from its Prometheus text.

Only the few names that routing needs are looked at; vLLM's (old and new) and SGLang's are told apart by their prefix.
A data-parallel engine has one series a rank: requests add up, KV usage is the mean, since blocks are spread evenly.
"""

import re

from kvroute.fleet.instance import Load

_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_KV_TOKENS = ("sglang:max_total_num_tokens",)
_PAGE = ("sglang:page_size",)
_CACHE_CONFIG = "vllm:cache_config_info"

_SERIES = re.compile(r"^((?:vllm|sglang):\w+)(\{[^\n]*\})?[ \t]+(\S+)", re.M)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def parse_load(text: str, at: float) -> Load:
    """The load that `text` reports; `at` is when, in monotonic seconds. What it does not hold stays 0."""
    values: dict[str, list[float]] = {}
    kv_tokens = 0
    block_tokens = 0
    for name, labels, raw in _SERIES.findall(text):
        if name == _CACHE_CONFIG:
            config = dict(_LABEL.findall(labels))
            block_tokens = _int(config.get("block_size"))
            kv_tokens += _int(config.get("num_gpu_blocks")) * block_tokens
        else:
            try:
                values.setdefault(name, []).append(float(raw))
            except ValueError:
                continue
    usages = _found(values, _KV_USAGE)
    return Load(
        at=at,
        running=round(sum(_found(values, _RUNNING))),
        waiting=round(sum(_found(values, _WAITING))),
        kv_usage=sum(usages) / len(usages) if usages else 0.0,
        kv_tokens=kv_tokens or round(sum(_found(values, _KV_TOKENS))),
        block_tokens=block_tokens or round(max(_found(values, _PAGE), default=0.0)),
    )


def _found(values: dict[str, list[float]], names: tuple[str, ...]) -> list[float]:
    for name in names:
        if name in values:
            return [value for value in values[name] if value == value]
    return []


def _int(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0
