"""Runs Python code of a model's answer in a process of its own, with limits.

A Linux kernel with Landlock (5.13) and seccomp (x86-64, 64-bit ARM) guarantees the following, also for root and inside
a container: no network, no other processes, no signals to them, no reading of files but Python's own and the shared
libraries, no writing outside a folder of its own that is deleted afterwards, and limits on CPU time, memory, open
files, disk space (of files that have a name or are open) and output. Namespaces are not needed. Sizes and dates of
files elsewhere can still be asked for.

Without one of the two, an audit hook of Python refuses the same. This contains mistakes of a model, such as endless
loops and stray files; code that wants to escape can. Use a container or a virtual machine there. On macOS memory is not
limited. Windows is not supported. `SandboxResult.is_isolated`: whether the kernel enforced the limits of a run.
"""

from hf_parallel.evaluation.sandbox.run import SandboxResult, run_code

__all__ = ["SandboxResult", "run_code"]
