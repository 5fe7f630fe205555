"""Memory reuse by the C library, the largest single cost of a small training step on a CPU."""

import ctypes
import os
import sys

_MMAP_MAX, _TRIM_THRESHOLD, _ARENA_MAX = -4, -1, -8  # parameters of glibc's mallopt(3)
_HUGE_PAGES = "glibc.malloc.hugetlb"


def keep_freed_memory() -> bool:
    """Makes glibc keep freed memory instead of returning it to the kernel; True where it applies (Linux with glibc).

    XLA on a CPU allocates its buffers anew at every call. By default glibc maps each large one from the kernel and unmaps it
    after, so every page is faulted in and zeroed again. Call before jax allocates; the process keeps its peak until it ends.

    On one core all threads share one heap, which keeps it small. On several a shared heap is what they wait for: with it a
    program compiles a quarter longer, and the steps that follow, whose buffers then lie in what the compiler left, take up to a
    quarter longer too.
    """
    if not _is_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    options = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1} | ({_ARENA_MAX: 1} if _cores() == 1 else {})
    return all([mallopt(name, value) for name, value in options.items()])


def fault_in_huge_pages() -> None:
    """Starts this process anew with glibc told to ask the kernel for pages of 2 MB; does nothing where they are no help.

    A heap of another thread than the main one ends at 64 MB: a larger buffer, such as the temporaries of a program for several
    cores, is mapped and unmapped at every call whatever `keep_freed_memory` asks for. In pages of 2 MB that is 500 times fewer
    faults. glibc reads the setting when a process starts, and at no other time. On one core there is one heap, without an end.
    """
    told = os.environ.get("GLIBC_TUNABLES", "")
    if not _is_glibc() or _cores() == 1 or _HUGE_PAGES in told:
        return
    tunables = ":".join(filter(None, (told, f"{_HUGE_PAGES}=1")))
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"GLIBC_TUNABLES": tunables})


def _is_glibc() -> bool:
    return sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")


def _cores() -> int:
    return len(os.sched_getaffinity(0))
