"""The system calls of a process that change files, as strace writes them down."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
CALLS = (
    "openat,open,creat,write,pwrite64,writev,pwritev,pwritev2,ftruncate,truncate,fallocate,rename,renameat,"
    "renameat2,unlink,unlinkat,mkdir,mkdirat,rmdir,link,linkat,symlink,symlinkat,fsync,fdatasync,close,lseek,fcntl,"
    "copy_file_range,sendfile,sync_file_range,dup,dup2,dup3"
)
_LINE = re.compile(r"(\d+) +(.*)")
_UNFINISHED = re.compile(r"(.*) <unfinished \.\.\.>$")
_RESUMED = re.compile(r"<\.\.\. (\w+) resumed>(.*)")
_CALL = re.compile(r"(\w+)\((.*)\) += (-?\d+|\?)")
_ARGUMENT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"(\.\.\.)?|<[^>]*>(?:\(deleted\))?|([^",<]+)')


class Call(NamedTuple):
    """One that succeeded. A text among its arguments is bytes; a descriptor, a number or flags are text."""

    name: str
    arguments: tuple[bytes | str, ...]
    result: int
    began: int
    """How many calls had ended when it began."""


def available() -> bool:
    """Whether strace is there, and may trace."""
    program = shutil.which("strace")
    return (
        program is not None
        and subprocess.run([program, "-o", "/dev/null", "true"], check=False).returncode == 0
    )


def recorded(folder: Path, trace: Path) -> list[Call]:
    """The calls of `work` in a location in `folder`."""
    command = ["strace", "-f", "-y", "-xx", "-s", str(1 << 24), "-e", f"trace={CALLS}", "-o", str(trace)]
    work = [sys.executable, "-m", "tests.power.work", str(folder)]
    run = subprocess.run([*command, *work], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return list(calls(trace.read_text().splitlines()))


def calls(lines: list[str]) -> Iterator[Call]:
    """The calls in the order in which they ended."""
    unfinished: dict[str, tuple[str, int]] = {}
    ended = 0
    for line in lines:
        match = _LINE.fullmatch(line)
        assert match is not None, line
        thread, rest = match.groups()
        began = ended
        if found := _UNFINISHED.fullmatch(rest):
            unfinished[thread] = found[1], ended
            continue
        if found := _RESUMED.fullmatch(rest):
            before, began = unfinished.pop(thread)
            rest = before + found[2]
        found = _CALL.match(rest)
        if found is None or found[3] == "?" or int(found[3]) < 0:
            continue
        yield Call(found[1], _arguments(found[2]), int(found[3]), began)
        ended += 1


def _arguments(text: str) -> tuple[bytes | str, ...]:
    found: list[bytes | str] = []
    for part in _ARGUMENT.finditer(text):
        if part[1] is not None:
            assert not part[2], "a text was cut"
            found.append(bytes.fromhex(part[1].replace("\\x", "")))
        elif part[3] is not None and part[3].strip(" ,"):
            found += [piece.strip() for piece in part[3].split(",") if piece.strip()]
    return tuple(found)
