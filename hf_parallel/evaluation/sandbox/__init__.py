"""Runs Python code of a model's answer in a process of its own, with limits.

On Linux with Landlock (5.13) and seccomp, on x86-64 and 64-bit ARM, the kernel allows listed system calls only, also
for root and inside a container. Code has no network, no other processes, and nothing shared with them: no signals,
shared memory, queues, locks or watches. It reads Python's own files and the shared libraries only, and writes regular
files only, in a folder of its own that is deleted afterwards. CPU time, memory, threads, open files, disk space and
output are limited. Namespaces are not needed. Code can still see whether a path exists, and its size, dates and owner.

Elsewhere an audit hook of Python does the same. This contains mistakes of a model, such as endless loops and stray
files, but not code that wants to escape: use a container or a virtual machine. On macOS memory is not limited. Windows
is not supported. `SandboxResult.is_isolated` tells whether the kernel isolated a run.
"""

from hf_parallel.evaluation.sandbox.run import SandboxResult, run_code

__all__ = ["SandboxResult", "run_code"]
