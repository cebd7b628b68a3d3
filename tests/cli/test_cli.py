"""The command line: what a person types, and what they are told when it is wrong."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvroute import __version__
from kvroute.cli import main
from kvroute.simulator.process import free_port

ROOT = Path(__file__).parents[2]
ANY_PORTS = ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]


def run(*words: str, timeout_s: float = 30) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvroute.cli", *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=timeout_s)


@pytest.mark.parametrize("words", [["--help"], ["serve", "--help"], ["demo", "--help"], ["simulate", "--help"]])
def test_help_is_there(words: list[str]) -> None:
    done = run(*words)
    assert done.returncode == 0
    assert "usage: kvroute" in done.stdout


def test_version() -> None:
    assert run("--version").stdout == f"kvroute {__version__}\n"


def test_check_prints_what_it_understood(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(ROOT / "configs" / "quickstart.yaml")]) == 0
    assert "in order" in capsys.readouterr().out


def test_check_names_file_line_and_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("models:\n  m:\n    instanses: []\n")
    assert main(["check", str(file)]) == 2
    assert f"{file}:3: models.m.instanses: unknown field; did you mean 'instances'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve"], "give a configuration file, or instances with --instance URL"),
        (["serve", "x.yaml", "--instance", "http://a"], "exclude one another"),
        (["serve", "--instance", "a:8000"], "must be an http:// or https:// URL"),
        (["serve", "--instance", "http://a", "--policy", "best"], "unknown policy 'best'"),
        (
            ["serve", "--instance", "http://a", *ANY_PORTS, "--tokenizer", "/no/such"],
            "models.*.tokenizer: /no/such: no such folder",
        ),
        (["serve", "/no/such.yaml"], "can't be read"),
    ],
)
def test_mistakes_are_told_without_a_traceback(words: list[str], message: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(
            "serve", "--instance", "http://127.0.0.1:1", "--listen", f"127.0.0.1:{port}", "--admin", "127.0.0.1:0"
        )
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_says_where_and_ends_quietly(number: signal.Signals) -> None:
    port = free_port()
    command = [sys.executable, "-m", "kvroute.cli", "serve", "--instance", "http://127.0.0.1:1"]
    command += ["--listen", f"127.0.0.1:{port}", "--admin", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if f"serves on http://127.0.0.1:{port}, admin on http://127.0.0.1:" in line:
                break
        process.send_signal(number)
        rest = process.stderr.read()
        assert process.wait(10) == 0
    assert "Traceback" not in "".join(lines) + rest


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--instances", "0"], "must be at least 1"),
        (["--sessions", "0"], "must be at least 1"),
        (["--time-scale", "0"], "must be more than 0"),
        (["--port", "99999"], "must be a port"),
    ],
)
def test_a_demo_that_cannot_be_is_refused(words: list[str], message: str) -> None:
    done = run("demo", *words)
    assert done.returncode == 2
    assert message in done.stderr
