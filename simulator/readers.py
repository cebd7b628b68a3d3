"""Who reads from a pool now, over all processes that share its directory.

Each process that reads keeps one file `<host>-<pid>` in a hidden subfolder; its size in bytes is the number of its
reads, and its modification time says that the process is alive. What a killed process leaves behind is known by its
process id, or, where that id is another machine's or container's, by its age.
"""

import os
import socket
from collections.abc import Callable
from pathlib import Path

STALE_S = 1.0


class Readers:
    def __init__(self, pool: Path, *, wall_time: Callable[[], float]) -> None:
        """`wall_time`: seconds since the epoch, as the file system's. Makes the subfolder."""
        self._folder = pool / ".readers"
        self._host = socket.gethostname()
        self._mine = f"{self._host}-{os.getpid()}"
        self._wall_time = wall_time
        self._folder.mkdir(parents=True, exist_ok=True)

    def show(self, reads: int) -> None:
        """Tell the others; to be repeated well within STALE_S while there are reads."""
        path = self._folder / self._mine
        if reads == 0:
            path.unlink(missing_ok=True)
        else:
            with path.open("wb") as file:
                file.truncate(reads)
            os.utime(path)

    def others(self) -> int:
        """Reads of all other processes."""
        count = 0
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name != self._mine:
                    try:
                        status = entry.stat()
                    except FileNotFoundError:
                        continue
                    if self._alive(entry.name, status.st_mtime):
                        count += status.st_size
        return count

    def _alive(self, name: str, modified: float) -> bool:
        if self._wall_time() - modified > STALE_S:
            return False
        host, _, pid = name.rpartition("-")
        return host != self._host or _runs(int(pid))


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # Somebody else's process is one as well.
        return True
    return True
