"""Memory reuse by the C library, the largest single cost of a small training step on a CPU."""

import ctypes
import os
import sys

_MMAP_MAX, _TRIM_THRESHOLD, _ARENA_MAX = -4, -1, -8  # parameters of glibc's mallopt(3)


def keep_freed_memory() -> bool:
    """Makes glibc keep freed memory instead of returning it to the kernel; True where it applies (Linux with glibc).

    XLA on a CPU allocates its buffers anew at every call. By default glibc maps each large one from the kernel and unmaps it
    after, so every page is faulted in and zeroed again. Call before jax allocates; the process keeps its peak until it ends.

    On one core all threads share one heap, which keeps it small. On several a shared heap is what they wait for: with it a
    program compiles a quarter longer, and the steps that follow, whose buffers then lie in what the compiler left, take up to a
    quarter longer too.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        return False
    options = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1} | ({_ARENA_MAX: 1} if len(os.sched_getaffinity(0)) == 1 else {})
    return all([mallopt(name, value) for name, value in options.items()])
