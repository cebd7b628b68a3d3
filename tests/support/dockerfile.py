"""A Dockerfile as its instructions."""

import json
import re
from pathlib import Path
from typing import NamedTuple


class Instruction(NamedTuple):
    name: str
    arguments: str

    @property
    def words(self) -> list[str]:
        """Those of the exec form, which is JSON, else split at blanks."""
        if self.arguments.startswith("["):
            words: list[str] = json.loads(self.arguments)
            return words
        return self.arguments.split()


def read_stages(path: Path) -> list[list[Instruction]]:
    """The stages, each from its FROM on, with continued lines joined and comments left out."""
    lines = [line for line in path.read_text("utf-8").split("\n") if not line.startswith("#")]
    stages: list[list[Instruction]] = []
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).split("\n"):
        name, _, arguments = line.strip().partition(" ")
        if name == "FROM":
            stages.append([])
        if name:
            stages[-1].append(Instruction(name, arguments.strip()))
    return stages
