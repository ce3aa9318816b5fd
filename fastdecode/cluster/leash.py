"""Runs a program that the kernel kills when its parent dies, whatever the cause.

    python -m fastdecode.cluster.leash PARENT PROGRAM [ARGUMENT ...]

PARENT is the parent's process id. The thread that starts this process must live as long as the program is to run,
because the kernel watches the thread.
"""

from __future__ import annotations

import contextlib
import os
import sys

from fastdecode.daemon.process import die_with_parent


def main() -> None:
    parent, *command = sys.argv[1:]
    die_with_parent()
    if os.getppid() != int(parent):  # it has died before the call
        sys.exit(1)
    with contextlib.suppress(PermissionError):  # Ray's workers are nice, with which a node would starve beside others
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
