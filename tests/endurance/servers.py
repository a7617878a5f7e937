"""Real servers that are stopped, killed and started again on their data and port, on disks that get full, and
with a clock that steps."""

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from aiopersist.testing import servers

START_S = 60.0
POLL_S = 0.05
PR_SET_PDEATHSIG = 1
FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"
POSTGRES = {
    "listen_addresses": "127.0.0.1",
    "max_connections": 200,
    "max_wal_size": "128MB",
    "checkpoint_timeout": "30s",
    "autovacuum_naptime": "5s",
}


class Disk:
    """A file system of its own with so many bytes, or a folder where none may be mounted."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
        self.is_small = subprocess.run(command, capture_output=True, check=False).returncode == 0
        folder.chmod(0o755)

    def fill(self) -> None:
        """Leave nothing of it."""
        with (self.folder / "ballast").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 20))

    def empty(self) -> None:
        """Give back what `fill` took."""
        (self.folder / "ballast").unlink(missing_ok=True)

    def close(self) -> None:
        if self.is_small:
            subprocess.run(["umount", "-l", self.folder], check=True)


class Server:
    """One that runs until it is stopped, and again after that."""

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        log: Path,
        stop: signal.Signals,
        crash: signal.Signals,
        ready: Callable[[int], bool],
        *,
        env: Mapping[str, str],
        user: str | None = None,
        cwd: Path,
    ) -> None:
        self.command = command
        self.port = port
        self.log = log
        self.signals = {"stop": stop, "crash": crash}
        self.ready = ready
        self.env = env
        self.user = user
        self.cwd = cwd
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Return once it answers; a server that gives up, as on a full disk, is started again."""
        async with asyncio.timeout(START_S):
            while not await asyncio.to_thread(self.ready, self.port):
                if self.process is None or self.process.poll() is not None:
                    self._spawn()
                await asyncio.sleep(POLL_S)

    def _spawn(self) -> None:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(self.env),
                user=self.user,
                cwd=self.cwd,
                start_new_session=True,
                preexec_fn=_ends_with_its_parent,
            )

    async def end(self, how: str) -> None:
        """`how`: "stop" or "crash"."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(self.signals[how])
            await asyncio.to_thread(self.process.wait, START_S)


def _ends_with_its_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)


class Clock:
    """The clock of a server, which steps where `libfaketime` is installed."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.steps = Path(FAKETIME).exists()
        self.ahead_s = 0.0
        self.step(0.0)
        file.chmod(0o644)

    def step(self, by_s: float) -> None:
        """Forward, or back."""
        self.ahead_s += by_s
        self.file.write_text(f"{self.ahead_s:+.3f}s\n")

    @property
    def env(self) -> dict[str, str]:
        if not self.steps:
            return {}
        return {
            "LD_PRELOAD": FAKETIME,
            "FAKETIME_TIMESTAMP_FILE": str(self.file),
            "FAKETIME_CACHE_DURATION": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }


class Place:
    """Postgres and versitygw."""

    def __init__(self, folder: Path, disk_bytes: int) -> None:
        folder.chmod(0o755)
        self.disks = {name: Disk(folder / name, disk_bytes) for name in ("postgres", "s3")}
        self.clock = Clock(folder / "clock")
        self.servers = {"postgres": self._postgres(folder), "s3": self._s3(folder)}
        self.bucket = "endurance"

    def _postgres(self, folder: Path) -> Server:
        disk = self.disks["postgres"].folder
        data = disk / "data"
        programs, user = servers._init_postgres(data)
        port = servers.free_port()
        conf = {**POSTGRES, "port": port, "unix_socket_directories": str(data)}
        command = [str(programs / "postgres"), "-D", str(data)]
        command += [arg for name, value in conf.items() for arg in ("-c", f"{name}={value}")]
        return Server(
            command,
            port,
            folder / "postgres.log",
            signal.SIGINT,
            signal.SIGQUIT,  # ends at once, and recovers when it starts
            servers._postgres_accepts,
            env=os.environ | self.clock.env,
            user=user,
            cwd=data,
        )

    def _s3(self, folder: Path) -> Server:
        os.environ.setdefault("AWS_ACCESS_KEY_ID", "aiopersist")
        os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "aiopersist-secret")
        disk = self.disks["s3"].folder
        for name in ("objects", "metadata"):
            (disk / name).mkdir()
        program, port = servers.versitygw_path(), servers.free_port()
        assert program is not None, "versitygw is not on this machine"
        command = [program, "--quiet", "--keep-alive", "--port", f"127.0.0.1:{port}", "posix"]
        command += ["--sidecar", str(disk / "metadata"), str(disk / "objects")]
        keys = {
            "ROOT_ACCESS_KEY": os.environ["AWS_ACCESS_KEY_ID"],
            "ROOT_SECRET_KEY": os.environ["AWS_SECRET_ACCESS_KEY"],
        }
        return Server(
            command,
            port,
            folder / "s3.log",
            signal.SIGTERM,
            signal.SIGKILL,
            _connects,
            env=os.environ | keys,
            cwd=disk,
        )

    async def start(self) -> None:
        await asyncio.gather(*(server.start() for server in self.servers.values()))
        client = servers.s3_client(f"http://127.0.0.1:{self.servers['s3'].port}")
        await asyncio.to_thread(client.create_bucket, Bucket=self.bucket)

    def urls(self, ports: Mapping[str, int]) -> tuple[str, str]:
        """Of the blob store and of the consensus store, behind these ports."""
        endpoint = f"http://127.0.0.1:{ports['s3']}"
        blob = f"s3://{self.bucket}/blobs?endpoint={endpoint}&region=us-east-1"
        return blob, f"postgres://postgres@127.0.0.1:{ports['postgres']}/postgres?schema=endurance"

    @property
    def direct(self) -> tuple[str, str]:
        return self.urls({name: server.port for name, server in self.servers.items()})

    async def close(self) -> None:
        for server in self.servers.values():
            await server.end("stop")
        for disk in self.disks.values():
            disk.close()


def _connects(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
