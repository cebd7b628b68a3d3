"""The gateway beside its peers: requests/s on one core, added latency, streamed chunks/s.

    python benchmarks/gateway.py [--rounds 5] [--seconds 3] [--peers-python PYTHON]... [--json FILE]

Everything runs on this machine: the router under test is pinned to one core; the upstream (benchmarks/upstream.c) and
the load (wrk; benchmarks/streamload.c) share the other. All targets take turns within each round, so that drift of the
machine's speed hits them alike; medians over the rounds and ratios of medians are printed. Needs gcc and wrk.

A peer takes part when the interpreter of a virtual environment that holds it is named with --peers-python:
sglang-router (pip install sglang-router) and vllm-router (pip install vllm-router).
"""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build" / "bench"
ROUTER_CORE, LOAD_CORE = "0", "1"
INSTANCES = 8
CONNECTIONS = (1, 32, 256)
STREAMS = ((64, 2000), (512, 20000))
"""(open streams, microseconds between two chunks of one)."""

CHAT = {"model": "bench", "messages": [{"role": "user", "content": "Name three colours of the rainbow, please."}]}


@dataclass(frozen=True)
class Target:
    name: str
    command: Sequence[str]
    """Empty for the upstream itself. {port} and {workers} are filled in."""


@dataclass
class Process:
    args: Sequence[str]
    core: str
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            ["taskset", "-c", self.core, *self.args],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def cpu_seconds(self) -> float:
        """User and system time of the process and its children so far."""
        ticks = sum(int(fields[11]) + int(fields[12]) for fields in self._stats())
        return ticks / os.sysconf("SC_CLK_TCK")

    def rss_mb(self) -> float:
        """Resident memory of the process and its children, in millions of bytes."""
        return sum(int(fields[21]) for fields in self._stats()) * os.sysconf("SC_PAGE_SIZE") / 1e6

    def _stats(self) -> Iterator[list[str]]:
        """The fields of proc(5)'s stat behind the command, of each process in the session that this one leads."""
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == self.process.pid:
                yield fields

    def stop(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(5)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def build_tools() -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    for name in ("upstream", "streamload"):
        subprocess.run(["gcc", "-O2", "-o", BUILD / name, HERE / f"{name}.c"], check=True)


def wait_serving(port: int, seconds: float = 60.0) -> None:
    """Until a chat through `port` is answered: a router may need its own rounds of health checks first."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(CHAT).encode(), {"content-type": "application/json"}
    )
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                answer.read()
            return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def write_wrk_script(path: Path, body: bytes) -> None:
    body_file = path.with_suffix(".json")
    body_file.write_bytes(body)
    path.write_text(
        f'local file = io.open("{body_file}", "rb")\n'
        'wrk.method = "POST"\nwrk.body = file:read("*a")\nwrk.headers["Content-Type"] = "application/json"\n'
    )


def seconds_of(text: str) -> float:
    value, unit = re.fullmatch(r"([\d.]+)(us|ms|s|m)", text).groups()  # type: ignore[union-attr]
    return float(value) * {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}[unit]


def load(port: int, connections: int, seconds: int, script: Path) -> dict[str, float]:
    """One wrk run: requests/s, latency percentiles in ms, errors."""
    output = subprocess.run(
        ["taskset", "-c", LOAD_CORE, "wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--latency", "-s", script]
        + [f"http://127.0.0.1:{port}/v1/chat/completions"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    errors = 0
    for pattern in (
        r"Non-2xx or 3xx responses: (\d+)",
        r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)",
    ):
        if found := re.search(pattern, output):
            errors += sum(map(int, found.groups()))
    rate = re.search(r"Requests/sec:\s+([\d.]+)", output)
    p50 = re.search(r"^\s+50%\s+(\S+)\s*$", output, re.M)
    p99 = re.search(r"^\s+99%\s+(\S+)\s*$", output, re.M)
    if rate is None or p50 is None or p99 is None:
        raise RuntimeError(f"wrk said:\n{output}")
    return {
        "requests_per_s": float(rate[1]),
        "p50_ms": seconds_of(p50[1]) * 1e3,
        "p99_ms": seconds_of(p99[1]) * 1e3,
        "errors": errors,
    }


def stream(port: int, streams: int, seconds: int, body: Path) -> dict[str, float]:
    output = subprocess.run(
        ["taskset", "-c", LOAD_CORE, BUILD / "streamload", "127.0.0.1", str(port)]
        + ["--streams", str(streams), "--seconds", str(seconds), "--path", "/v1/chat/completions", "--body", body],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    result = json.loads(output)
    return {
        "chunks_per_s": result["events_per_s"],
        "ttft_p50_ms": result["ttft_ms"]["p50"],
        "ttft_p99_ms": result["ttft_ms"]["p99"],
        "gap_p99_ms": result["gap_ms"]["p99"],
        "failed": result["failed"],
    }


def kvroute_command(config: Path, workers: Sequence[int]) -> Sequence[str]:
    """Everything that an operator would have on: prefix hashing, index, cost model, default policy, metrics."""
    instances = "".join(f'      - "http://127.0.0.1:{port}"\n' for port in workers)
    config.write_text(
        'server: {listen: "127.0.0.1:${KVROUTE_PORT}", admin: "127.0.0.1:0"}\n'
        f"telemetry: {{request_log: {BUILD / 'requests.log'}}}\n"
        "models:\n  bench:\n    instances:\n" + instances
    )
    return [sys.executable, "-m", "kvroute.cli", "serve", str(config)]


def peer_targets(pythons: Sequence[str]) -> list[Target]:
    """Peers found in the given interpreters' environments, by their own documented start commands."""
    targets = []
    for python in pythons:
        for module, name in (("sglang_router", "sglang-router"), ("vllm_router", "vllm-router")):
            found = subprocess.run(
                [python, "-c", f"import importlib.util as u, sys; sys.exit(u.find_spec('{module}') is None)"],
                check=False,
            )
            if found.returncode == 0:
                targets.append(
                    Target(
                        name,
                        [python, "-m", f"{module}.launch_router", "--host", "127.0.0.1", "--port", "{port}"]
                        + ["--policy", "round_robin", "--log-level", "error", "--worker-urls", "{workers}"],
                    )
                )
    return targets


def measure(target: Target, workers: Sequence[int], stream_workers: Sequence[int], seconds: int) -> dict[str, float]:
    """One turn of one target: every load, one after another."""
    script = BUILD / "chat.lua"
    write_wrk_script(script, json.dumps(CHAT).encode())
    stream_body = BUILD / "stream.json"
    stream_body.write_text(json.dumps(CHAT | {"stream": True}))
    figures: dict[str, float] = {}
    with ExitStack() as stack:
        port, router = start(target, workers, stack)
        load(port, 8, 1, script)
        for connections in CONNECTIONS:
            before = router.cpu_seconds() if router else 0.0
            result = load(port, connections, seconds, script)
            for key in ("requests_per_s", "p50_ms", "p99_ms", "errors"):
                figures[f"c{connections} {key}"] = result[key]
            if router:
                used = router.cpu_seconds() - before
                figures[f"c{connections} cpu_s_per_1k"] = used / max(1.0, result["requests_per_s"] * seconds) * 1e3
        if router:
            figures["rss_mb"] = router.rss_mb()
    for (streams, _), worker in zip(STREAMS, stream_workers, strict=True):
        with ExitStack() as stack:
            port, _ = start(target, [worker], stack)
            result = stream(port, streams, seconds, stream_body)
            for key, value in result.items():
                figures[f"s{streams} {key}"] = value
    return figures


def start(target: Target, workers: Sequence[int], stack: ExitStack) -> tuple[int, Process | None]:
    if not target.command:
        return workers[0], None
    port = free_port()
    urls = [f"http://127.0.0.1:{worker}" for worker in workers]
    args: list[str] = []
    for word in target.command:
        args += urls if word == "{workers}" else [word.replace("{port}", str(port))]
    if target.name == "kvroute":
        args = list(kvroute_command(BUILD / "kvroute.yaml", workers))
        os.environ["KVROUTE_PORT"] = str(port)
    router = Process(args, ROUTER_CORE)
    stack.callback(router.stop)
    wait_serving(port)
    return port, router


def report(results: dict[str, dict[str, float]]) -> str:
    names = list(results)
    width = max(len(key) for figures in results.values() for key in figures) + 2
    lines = ["".ljust(width) + "".join(name.rjust(16) for name in names)]
    for key in dict.fromkeys(key for figures in results.values() for key in figures):
        cells = [f"{results[name][key]:16.5g}" if key in results[name] else " " * 15 + "-" for name in names]
        lines.append(key.ljust(width) + "".join(cells))
    for peer in names:
        if peer not in ("kvroute", "upstream"):
            ratios = [
                f"{key.split()[0]} {results['kvroute'][key] / results[peer][key]:.2f}"
                for key in results["kvroute"]
                if key.endswith("_per_s") and results[peer].get(key)
            ]
            lines.append(f"kvroute / {peer} (requests/s, chunks/s): " + ", ".join(ratios))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3, help="of each load in each round")
    parser.add_argument("--peers-python", action="append", default=[], help="interpreter of an environment with a peer")
    parser.add_argument("--json", type=Path, help="write every round's figures there")
    options = parser.parse_args()
    for tool in ("gcc", "wrk", "taskset"):
        if shutil.which(tool) is None:
            sys.exit(f"{tool} is needed and not on PATH")
    build_tools()
    targets = [Target("upstream", []), Target("kvroute", ["kvroute"]), *peer_targets(options.peers_python)]
    rounds: dict[str, list[dict[str, float]]] = {target.name: [] for target in targets}
    with ExitStack() as stack:
        workers, stream_workers = [], []
        for _ in range(INSTANCES):
            workers.append(free_port())
            stack.callback(Process([str(BUILD / "upstream"), str(workers[-1])], LOAD_CORE).stop)
        for _, interval_us in STREAMS:
            stream_workers.append(free_port())
            command = [str(BUILD / "upstream"), str(stream_workers[-1]), "--chunks", "200"]
            stack.callback(Process([*command, "--interval-us", str(interval_us)], LOAD_CORE).stop)
        for port in (*workers, *stream_workers):
            wait_serving(port)
        for number in range(1, options.rounds + 1):
            for target in targets:
                print(f"round {number}/{options.rounds}: {target.name}", file=sys.stderr, flush=True)
                rounds[target.name].append(measure(target, workers, stream_workers, options.seconds))
    medians = {
        name: {key: statistics.median(each[key] for each in taken) for key in taken[0]}
        for name, taken in rounds.items()
    }
    print(report(medians))
    if options.json:
        options.json.write_text(json.dumps({"rounds": rounds, "medians": medians}, indent=1))


if __name__ == "__main__":
    main()
