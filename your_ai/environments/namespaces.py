"""Run a program in namespaces of Linux: without network, and with few files, which it cannot write.

    python -I -S namespaces.py '[["/usr", "/usr"], ...]' FOLDER_MB PROGRAM ARGUMENT...

The pairs are a file or folder and the place where the program finds it. What it writes is in
`/folder`, in memory, and gone at the end. It can start no process or thread. It ends when stdin of
this one is closed. Needs Linux 5.14 (mount_setattr, and numbers of processes by namespace).

A program of its own, with nothing but the standard library: its modules would be in the sandbox.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys
from collections.abc import Sequence

# From <linux/sched.h>, <linux/mount.h>, <linux/prctl.h>. The standard library has them from
# Python 3.12 on.
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
MNT_DETACH = 0x2
MOUNT_SETATTR = 442  # the number of this call, on all architectures
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 0x1, 0x2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38

OWN_ID = 1000  # of the program's user and group, inside
NOBODY = 65534  # outside, where root starts it
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
FOLDER = "/folder"  # the only one that the program can write to
OLD = "/old"  # the computer's files, while the program's are gathered
ENVIRONMENT = {
    "HOME": FOLDER, "TMPDIR": FOLDER, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
}  # fmt: skip

# Calls that give memory which no limit counts (memfd_create, memfd_secret, shmget, msgget, bpf,
# io_uring_setup, add_key, userfaultfd), by processor: from <asm/unistd.h>, <linux/audit.h>.
DENIED = {
    "x86_64": (0xC000003E, (319, 447, 29, 68, 321, 425, 248, 323)),
    "aarch64": (0xC00000B7, (279, 447, 194, 186, 280, 425, 217, 282)),
}
OTHER_CALLS = 0x40000000  # from this number on: other names for the same calls (x86_64's x32)
FILTER, LOAD, EQUALS, AT_LEAST, RETURN = 2, 0x20, 0x15, 0x35, 0x06  # <linux/seccomp.h>, bpf_common
ALLOW, REFUSE = 0x7FFF0000, 0x00050001  # the latter with EPERM
OPEN_FILES = 256  # whose buffers no limit counts either

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> None:
    """Call a function of libc. Raises OSError."""
    given = [each.encode() if isinstance(each, str) else each for each in arguments]
    if getattr(libc, name)(*given) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def main(files: Sequence[tuple[str, str]], folder_mb: int, program: list[str]) -> int:
    """Run the program. Returns its exit status, or 128 + the signal that ended it."""
    uid, gid = os.geteuid(), os.getegid()
    enter_namespaces(uid, gid)
    first = os.fork()  # is process 1 of the new namespace: all others end with it
    if first:
        return status_of(os.waitpid(first, 0)[1])
    gather(files, folder_mb)
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    child = os.fork()
    if not child:
        start(program, is_root=uid == 0)
    while True:
        if 0 in select.select([0, wake], [], [])[0]:
            os._exit(0)  # nobody waits for the program any more
        os.read(wake, 1)
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            os._exit(status_of(status))


def status_of(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def enter_namespaces(uid: int, gid: int) -> None:
    """Move this process, and its later children, into namespaces of their own."""
    process = os.getpid()
    ready, go = os.pipe()
    helper = os.fork()
    if not helper:  # a process outside: who may use which ids is written from there
        os.close(go)
        os.read(ready, 1)
        write_ids(process, uid, gid)
        os._exit(0)
    call("unshare", CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET)
    os.write(go, b".")
    os.waitpid(helper, 0)
    os.close(go)
    os.close(ready)


def write_ids(process: int, uid: int, gid: int) -> None:
    """The ids inside a process's user namespace, by those outside.

    The limit of processes does not hold for root, so root's programs run as nobody.
    """
    if uid != 0:
        write(f"/proc/{process}/setgroups", "deny")
    for kind, number in (("uid", uid), ("gid", gid)):
        both = f"0 0 1\n{OWN_ID} {NOBODY} 1\n" if uid == 0 else f"{OWN_ID} {number} 1\n"
        write(f"/proc/{process}/{kind}_map", both)


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def gather(files: Sequence[tuple[str, str]], folder_mb: int) -> None:
    """Make a root of the given files, all read-only, and an empty folder to write to."""
    call("mount", None, "/", None, MS_REC | MS_PRIVATE, None)
    call("mount", "tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    os.mkdir(f"/tmp{OLD}")
    call("pivot_root", "/tmp", f"/tmp{OLD}")
    os.chdir("/")
    for source, target in (*files, *((device, device) for device in DEVICES)):
        if not os.path.lexists(target):
            show(OLD + source, target)
    call("umount2", OLD, MNT_DETACH)
    os.rmdir(OLD)
    os.mkdir(FOLDER)
    if not os.path.exists("/tmp"):
        os.symlink(FOLDER, "/tmp")
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    size = ctypes.sizeof(attributes)
    call("syscall", MOUNT_SETATTR, AT_FDCWD, "/", AT_RECURSIVE, attributes, size)
    options = f"mode=1777,size={folder_mb}m,nr_inodes=10000"
    call("mount", "tmpfs", FOLDER, "tmpfs", MS_NOSUID | MS_NODEV, options)
    os.chdir(FOLDER)


def show(source: str, target: str) -> None:
    """Let a file, a folder or a link be seen at a place of the new root."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
    elif os.path.isdir(source):
        os.mkdir(target)
        call("mount", source, target, None, MS_BIND | MS_REC, None)
    elif os.path.exists(source):
        write(target, "")
        call("mount", source, target, None, MS_BIND, None)


def start(program: list[str], is_root: bool) -> None:
    """Become the program. It has no capabilities: they end when a user that is not root starts a
    program."""
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    if is_root:
        os.setgroups([])
        os.setresgid(OWN_ID, OWN_ID, OWN_ID)
        os.setresuid(OWN_ID, OWN_ID, OWN_ID)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    deny_calls()
    os.execve(program[0], program, ENVIRONMENT)


def deny_calls() -> None:
    """Let the kernel refuse the calls in DENIED, with a filter that this process cannot undo."""
    if os.uname().machine not in DENIED:
        return  # the trial of the sandbox will find out
    processor, denied = DENIED[os.uname().machine]
    steps = [(LOAD, 0, 0, 4), (EQUALS, 0, len(denied) + 3, processor), (LOAD, 0, 0, 0)]
    steps += [(AT_LEAST, len(denied) + 1, 0, OTHER_CALLS)]
    steps += [(EQUALS, len(denied) - place, 0, number) for place, number in enumerate(denied)]
    steps += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    held = ctypes.create_string_buffer(code)
    program = struct.pack("HP", len(steps), ctypes.addressof(held))
    call("prctl", PR_SET_SECCOMP, FILTER, program, 0, 0)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
