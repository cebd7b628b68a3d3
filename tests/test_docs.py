"""What the documentation must not forget."""

import re
from pathlib import Path

from kvroute.policies.registry import BUILT_IN
from kvroute.simulator.faults import FaultKind
from kvroute.telemetry.metrics import Metrics
from kvroute.telemetry.request_log import RequestRecord

ROOT = Path(__file__).parents[1]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()


def missing(names: set[str], text: str) -> set[str]:
    assert names
    return {name for name in names if f"`{name}`" not in text}


def test_every_metric_is_documented() -> None:
    exposed = Metrics().render([], {}, True).decode()
    families = set(re.findall(r"^# TYPE (kvroute_\w+) \w+$", exposed, re.M))
    created = {name for name in families if name.endswith("_created")}
    assert missing(families - created, OPERATIONS) == set()


def test_every_field_of_the_request_log_is_documented() -> None:
    assert missing(set(RequestRecord.__struct_fields__), OPERATIONS) == set()


def test_every_error_code_is_documented() -> None:
    codes = set()
    for file in (ROOT / "router" / "api").glob("*.py"):
        codes |= set(
            re.findall(r'code="(\w+)"|"(?:server_error|invalid_request_error)", \w+, "(\w+)"', file.read_text())
        )
        codes |= {(code, "") for code in re.findall(r'RefusedRequest\(\d+, .*"(\w+)"\)', file.read_text())}
    names = {one or other for one, other in codes}
    assert missing(names, OPERATIONS) == set()


def test_every_policy_is_documented() -> None:
    assert missing(set(BUILT_IN), (ROOT / "docs" / "policies.md").read_text()) == set()


def test_links_between_documents_lead_somewhere() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    for document in documents:
        for target in re.findall(r"\]\(([^)#:]+\.md)\)", document.read_text()):
            assert (document.parent / target).is_file(), f"{document.name} -> {target}"


def test_every_fault_of_the_simulator_is_documented() -> None:
    assert missing({str(kind) for kind in FaultKind}, (ROOT / "docs" / "simulator.md").read_text()) == set()
