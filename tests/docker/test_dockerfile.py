"""The image: lean, pinned, not root, and with a health check that tells the truth."""

import fnmatch
import os
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from kvroute.config import config_for_instances
from kvroute.simulator.process import free_port
from tests.support.dockerfile import Instruction, read_stages
from tests.support.linters import lint

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docker/Dockerfile"
BUILD, FINAL = read_stages(DOCKERFILE)


def only(stage: list[Instruction], name: str) -> Instruction:
    [instruction] = [each for each in stage if each.name == name]
    return instruction


def copied() -> list[str]:
    """What the build takes from the repository."""
    return [source for each in BUILD if each.name == "COPY" for source in each.words[:-1]]


def test_hadolint_has_nothing_to_say() -> None:
    assert lint("hadolint", "--no-color", "--failure-threshold", "style", str(DOCKERFILE)) == ""


def test_both_stages_start_from_the_same_tagged_image() -> None:
    images = [only(stage, "FROM").words[0] for stage in (BUILD, FINAL)]
    assert images[0] == images[1]
    name, _, tag = images[0].partition(":")
    assert name == "python"
    assert tag not in ("", "latest")


def test_the_image_is_of_a_python_that_the_project_supports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    version = only(FINAL, "FROM").words[0].partition(":")[2].partition("-")[0]
    assert project["requires-python"] == f">={version}"


def test_the_gateway_runs_as_a_numbered_user_that_is_not_root() -> None:
    user, _, group = only(FINAL, "USER").arguments.partition(":")
    assert int(user) >= 1000
    assert int(group) >= 1000


def test_the_final_stage_installs_and_runs_nothing() -> None:
    """So there is no cache, no package list and no compiler to leave behind."""
    assert [each.name for each in FINAL if each.name in ("RUN", "ADD")] == []
    assert [each.words[0] for each in FINAL if each.name == "COPY"] == ["--from=build"]


def test_nothing_is_fetched_by_add() -> None:
    assert [each for each in BUILD if each.name == "ADD"] == []


def test_the_labels_are_those_of_the_oci() -> None:
    label = only(FINAL, "LABEL").arguments
    for name in ("title", "description", "licenses", "base.name"):
        assert f"org.opencontainers.image.{name}=" in label
    assert f'base.name="docker.io/library/{only(FINAL, "FROM").words[0]}"' in label


def test_the_exposed_ports_are_the_configurations_defaults() -> None:
    server = config_for_instances(["http://a:1"]).server
    assert server.admin is not None
    assert only(FINAL, "EXPOSE").words == [str(server.listen[1]), str(server.admin[1])]


def test_the_build_takes_every_package_folder_and_only_files_that_are_there() -> None:
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["package-dir"].values()
    assert set(folders) <= set(copied())
    assert [source for source in copied() if not (ROOT / source).exists()] == []


def test_what_the_build_does_not_copy_is_not_sent_to_it() -> None:
    lines = [line for line in DOCKERFILE.with_suffix(".dockerignore").read_text("utf-8").split("\n") if line]
    ignored, *rest = [line for line in lines if not line.startswith("#")]
    assert ignored == "*"
    assert {line[1:] for line in rest if line.startswith("!")} == set(copied())
    assert any(fnmatch.fnmatch("router/api/__pycache__", line) for line in rest)


def test_processes_get_signals_themselves() -> None:
    """In shell form a shell would be process 1, and SIGTERM would drain nothing."""
    assert only(FINAL, "ENTRYPOINT").arguments.startswith("[")
    assert only(FINAL, "CMD").arguments.startswith("[")


# The health check, run as Docker would run it


@contextmanager
def server_that_answers(status: int) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/health"
        server.shutdown()
        thread.join()


def check_health(url: str, **environ: str) -> int:
    command = Instruction("CMD", only(FINAL, "HEALTHCHECK").arguments.partition("CMD ")[2]).words
    assert command[0] == "python"
    environ = {**os.environ, **environ, "KVROUTE_HEALTH_URL": url}
    return subprocess.run([sys.executable, *command[1:]], env=environ, capture_output=True, check=False).returncode


def test_the_health_check_passes_while_the_gateway_lives() -> None:
    with server_that_answers(200) as url:
        assert check_health(url) == 0


def test_the_health_check_asks_no_proxy() -> None:
    with server_that_answers(200) as url:
        assert check_health(url, http_proxy=f"http://127.0.0.1:{free_port()}", no_proxy="") == 0


def test_the_health_check_fails_on_an_error() -> None:
    with server_that_answers(500) as url:
        assert check_health(url) != 0


def test_the_health_check_fails_when_nobody_listens() -> None:
    assert check_health(f"http://127.0.0.1:{free_port()}/health") != 0


def test_the_health_check_asks_the_default_admin_port() -> None:
    admin = config_for_instances(["http://a:1"]).server.admin
    assert admin is not None
    assert f"KVROUTE_HEALTH_URL=http://127.0.0.1:{admin[1]}/health" in only(FINAL, "ENV").arguments


@pytest.mark.parametrize("option", ["--interval", "--timeout", "--start-period", "--retries"])
def test_the_health_check_leaves_no_timing_to_chance(option: str) -> None:
    assert f"{option}=" in only(FINAL, "HEALTHCHECK").arguments
