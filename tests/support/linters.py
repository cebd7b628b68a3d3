"""Linters that come as wheels with a program in them."""

import shutil
import subprocess
import sys
from pathlib import Path


def lint(program: str, *arguments: str) -> str:
    """What the linter has to say; nothing when all is well."""
    path = shutil.which(program, path=str(Path(sys.executable).parent)) or shutil.which(program)
    if path is None:
        raise RuntimeError(f"no {program}: run the tests with `make test`, which installs it")
    result = subprocess.run([path, *arguments], capture_output=True, text=True, check=False)
    return "" if result.returncode == 0 else result.stdout + result.stderr
