"""glibc's settings, seen from outside: page faults of a process that uses the same buffers again and again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from k2jax import allocator

pytestmark = pytest.mark.skipif(not allocator._is_glibc(), reason="glibc's settings")
CORES = sorted(os.sched_getaffinity(0))[:2] if allocator._is_glibc() else []
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # says who gets huge pages: all, those who ask, nobody

FAULTS = """
import ctypes, resource, threading
from k2jax import allocator
{first}
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def use():
    for _ in range(20):
        buffer = libc.malloc(80_000_000)  # more than the heap of another thread than the main one holds
        libc.memset(buffer, 1, 80_000_000)
        libc.free(buffer)
def faults():
    thread = threading.Thread(target=use)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread.start(); thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults())
"""


def _faults(first, cores):
    """Page faults of twenty buffers of 80 MB, one after the other, in a thread."""
    command = [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {cores})\n" + FAULTS.format(first=first)]
    env = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    return int(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(len(CORES) < 2, reason="on one core there is one heap")
@pytest.mark.skipif(not THP.exists() or "[madvise]" not in THP.read_text(), reason="asking for huge pages makes no difference")
def test_huge_pages_end_the_faults_of_large_buffers_of_threads():
    both = "allocator.fault_in_huge_pages(); allocator.keep_freed_memory()"
    before, after, on_one_core = (
        _faults("allocator.keep_freed_memory()", CORES),
        _faults(both, CORES),
        _faults(both, CORES[:1]),  # where one heap grows once, and no new start is needed
    )
    assert before >= 20 * 80_000_000 // 4096 and after < before / 100 and on_one_core < 1.1 * before / 20


def test_a_setting_of_the_user_is_kept():
    told = "glibc.malloc.hugetlb=0:glibc.malloc.arena_max=3"
    script = "from k2jax import allocator; import os; allocator.fault_in_huge_pages(); print(os.environ['GLIBC_TUNABLES'])"
    for given, kept in ((told, told), ("glibc.malloc.arena_max=3", "glibc.malloc.arena_max=3:glibc.malloc.hugetlb=1")):
        run = subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"GLIBC_TUNABLES": given},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.strip() == (kept if len(os.sched_getaffinity(0)) > 1 else given)


@pytest.mark.skipif(len(CORES) < 2, reason="on one core there is one heap")
def test_a_run_starts_with_huge_pages(tmp_path):
    (tmp_path / "shown.py").write_text("import os\n\ndef config():\n    raise ValueError(os.environ.get('GLIBC_TUNABLES'))\n")
    env = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"} | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run([sys.executable, "-m", "k2jax.train", "shown"], env=env, capture_output=True, text=True)
    assert "glibc.malloc.hugetlb=1" in run.stderr
