"""What an experiment leaves behind: JSON lines, and what its figures were measured on."""

import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path


def append_line(path: Path, row: dict) -> None:
    """Appends one JSON line in one write."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, (json.dumps(row, allow_nan=False) + "\n").encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_lines(path: Path) -> list[dict]:
    """The rows of a file of JSON lines; a line that a kill cut off is left out."""
    rows = []
    for line in _lines_of(path):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Python's version and those of packages."""
    return {"python": platform.python_version()} | {package: version(package) for package in packages}


def machine() -> dict:
    """System, processor, cores this process may use, memory and load."""
    names = [line.split(":", 1)[1].strip() for line in _lines_of(Path("/proc/cpuinfo")) if line.startswith("model name")]
    memory = [int(line.split()[1]) // 2**20 for line in _lines_of(Path("/proc/meminfo")) if line.startswith("MemTotal")]
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": memory[0] if memory else None,
        "load_average": round(os.getloadavg()[0], 2),
    }


def _lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
