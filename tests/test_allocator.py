"""glibc's settings, seen from outside: page faults of a process that uses the same buffers again and again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from k2jax import allocator

pytestmark = pytest.mark.skipif(not allocator.keep_freed_memory(), reason="glibc's settings")

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


def _faults(first, cores, **env):
    """Page faults of twenty buffers of 80 MB, one after the other, in a thread."""
    command = [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {cores})\n" + FAULTS.format(first=first)]
    env = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"} | env
    return int(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)


def test_huge_pages_end_the_faults_of_large_buffers_of_threads():
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("on one core there is one heap")
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("the kernel has no huge pages to give")
    before = _faults("allocator.keep_freed_memory()", cores)
    after = _faults("allocator.fault_in_huge_pages(); allocator.keep_freed_memory()", cores)
    assert before > 20 * 19_000 and after < before / 50
    # One core has one heap, which grows, and needs no new start.
    assert _faults("allocator.fault_in_huge_pages(); allocator.keep_freed_memory()", cores[:1]) < before / 10


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
