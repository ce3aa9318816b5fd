"""RDMA verbs on a machine without an RDMA device: Soft-RoCE (rdma_rxe) in a small QEMU guest, which has two NUMA nodes.

    python tests/rdma/guest.py prepare            once: downloads Debian packages (about 90 MB), installs nothing
    python tests/rdma/guest.py run COMMAND...     runs a command in a guest, in the current folder

The guest's root is an overlay over this machine's own files, read-only, with the RDMA packages (libibverbs, pyverbs,
perftest) on top: the command sees the same files and the same Python as here, and what it writes is gone afterwards.
It is emulated, so Python is some 20 times slower. `devices.sh` says which RDMA devices there are.

Needs Debian or a relative of it for `prepare` (apt-get, dpkg), and nothing more to run. The cache is
$FASTDECODE_RDMA_VM, or fastdecode-rdma-vm below $XDG_CACHE_HOME or ~/.cache.
"""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import mmap
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import initrd

HERE = Path(__file__).parent
_PACKAGES = ["libibverbs1", "ibverbs-providers", "ibverbs-utils", "librdmacm1", "libibumad3", "libpci3"]
_PACKAGES += ["libnl-3-200", "libnl-route-3-200", "perftest", "python3-pyverbs", "libibverbs-dev"]
_KERNEL_ARGUMENTS = (
    "console=ttyS0 quiet panic=-1 mitigations=off nokaslr no_timer_check random.trust_cpu=on audit=0 "
    "norandmaps rdinit=/init tsc=reliable tsc_early_khz={tsc_khz} softlockup_panic=1"
)


class NotHere(Exception):
    """This machine cannot run a guest; the message gives the reason."""


def cache() -> Path:
    own = os.environ.get("FASTDECODE_RDMA_VM")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "fastdecode-rdma-vm")


# ---- prepare ----


def _call(*command: str, cwd: Path) -> str:
    try:
        return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError:
        raise NotHere(f"{command[0]} is not installed, is this Debian?") from None
    except subprocess.CalledProcessError as error:
        raise NotHere(f"{shlex.join(command)[:200]} failed: {error.stderr.strip()[-300:]}") from None


class _Archive:
    """The packages that apt can download. Uses its own package lists, because the machine's may be missing or old."""

    def __init__(self, folder: Path):
        self._folder = folder
        for name in ("lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True)
        self._options = ["-o", f"Dir::State::Lists={folder}/lists", "-o", f"Dir::Cache={folder}/cache"]
        self._options += ["-o", "APT::Sandbox::User="]
        self.apt("apt-get", "update", "-q")

    def apt(self, tool: str, *arguments: str) -> str:
        return _call(tool, *self._options, *arguments, cwd=self._folder)

    def lacking(self, package: str) -> list[str]:
        """The package and its dependencies that are not installed."""
        plan = self.apt("apt-get", "install", "-s", "--no-install-recommends", package)
        return [line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")]


def _version() -> str:
    """A key that changes whenever `prepare` would make other files."""
    sources = [(HERE / name).read_text() for name in ("init.sh", "initrd.py")]
    return hashlib.sha256(repr([*sources, _PACKAGES, inspect.getsource(prepare)]).encode()).hexdigest()


def _is_ready() -> bool:
    try:
        return (cache() / "ready").read_text() == _version()
    except FileNotFoundError:
        return False


def prepare() -> None:
    """Fill the cache, unless it is full. Raises NotHere."""
    if _is_ready():
        return
    home = cache()
    shutil.rmtree(home, ignore_errors=True)
    debs = home / "debs"
    archive = _Archive(debs)
    # The metapackage names a kernel that the archive still has.
    depends = archive.apt("apt-cache", "depends", "linux-image-amd64")
    kernels = [w for w in depends.split() if w.startswith("linux-image-") and w != "linux-image-amd64"]
    if not kernels:
        raise NotHere("the package archive has no linux-image-amd64")
    kernel = kernels[0]
    qemu = [] if shutil.which("qemu-system-x86_64") else archive.lacking("qemu-system-x86")
    packages = [*_PACKAGES, *([] if shutil.which("rdma") else archive.lacking("iproute2"))]
    archive.apt("apt-get", "download", "-q", kernel, "busybox-static", *packages, *qemu)

    def unpack(package: str, into: Path) -> None:
        (deb,) = debs.glob(f"{package}_*.deb")
        _call("dpkg", "-x", str(deb), str(into), cwd=debs)

    for package in qemu:
        unpack(package, home / "qemu")
    extra = home / "extra"
    for package in packages:
        unpack(package, extra)
    for name in ("bin", "sbin", "lib"):  # must not hide the guest's links of these names into /usr
        if (extra / name).is_dir():
            shutil.copytree(extra / name, extra / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(extra / name)
    own = extra / "opt/pyverbs"  # a folder with pyverbs alone, for PYTHONPATH
    own.mkdir(parents=True)
    (own / "pyverbs").symlink_to("/usr/lib/python3/dist-packages/pyverbs")

    unpack(kernel, home / "kernel")
    unpack("busybox-static", home / "busybox")
    (image,) = (home / "kernel/boot").glob("vmlinuz-*")
    (home / "vmlinux").write_bytes(initrd.unpack_kernel(image.read_bytes()))
    busybox = (home / "busybox/bin/busybox").read_bytes()
    (home / "initrd.gz").write_bytes(initrd.make_initramfs(home / "kernel", busybox, (HERE / "init.sh").read_bytes()))
    for name in ("debs", "kernel", "busybox"):
        shutil.rmtree(home / name)
    (home / "ready").write_text(_version())


# ---- run ----


def check() -> None:
    """Raise NotHere unless `run` works on this machine and this Python can load the guest's pyverbs."""
    if not _is_ready():
        raise NotHere("the virtual machine is not prepared: python tests/rdma/guest.py prepare")
    abi = f"cpython-{sys.version_info.major}{sys.version_info.minor}"
    if not list(cache().glob(f"extra/usr/lib/python3/dist-packages/pyverbs/qp.{abi}-*.so")):
        raise NotHere(f"Debian's pyverbs here is for another Python than {abi}")


def _qemu(home: Path) -> tuple[list[str], dict[str, str]]:
    own = home / "qemu/usr"
    if not own.exists():
        return ["qemu-system-x86_64"], dict(os.environ)
    libraries = f"{own}/lib/x86_64-linux-gnu:{home}/qemu/lib/x86_64-linux-gnu"
    command = [f"{own}/bin/qemu-system-x86_64", "-L", f"{own}/share/seabios", "-L", f"{own}/share/qemu"]
    return command, os.environ | {"LD_LIBRARY_PATH": libraries}


def _share(folder: Path | str, tag: str, read_only: bool = True) -> list[str]:
    options = ",readonly=on" if read_only else ""
    return ["-virtfs", f"local,path={folder},mount_tag={tag},security_model=none,multidevs=remap{options}"]


def _tsc_khz() -> int:
    """The rate of this machine's time-stamp counter, which the guest reads too.

    A guest that measures the rate while the machine is busy may err by a factor of four, and so may all its time-outs.
    """
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(bytes.fromhex("0f31 48c1e220 4809d0 c3"))  # rdtsc; shl rdx, 32; or rax, rdx; ret
    rdtsc = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(ctypes.c_char.from_buffer(code)))

    def now() -> tuple[int, int]:
        around = [(time.monotonic_ns(), rdtsc(), time.monotonic_ns()) for _ in range(100)]
        before, ticks, after = min(around, key=lambda x: x[2] - x[0])
        return ticks, (before + after) // 2

    ticks, ns = now()
    time.sleep(0.1)
    later_ticks, later_ns = now()
    return (later_ticks - ticks) * 1_000_000 // (later_ns - ns)


class Guest:
    """A running guest. It runs devices.sh, then a command, and prints the command's output."""

    def __init__(self, command: list[str], wire: str | None = None, number: int = 1):
        """`wire` is a -netdev of QEMU, on which the guest is host 10.9.0.`number`; None: the guest has no network."""
        home = cache()
        self._folder = tempfile.TemporaryDirectory(prefix="fastdecode-rdma-")
        folder = Path(self._folder.name)
        given = {name: value for name, value in os.environ.items() if name.startswith("FASTDECODE_")}
        given |= {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin", "HOME": "/root", "PYTHONPATH": "/opt/pyverbs"}
        given |= {"PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "FASTDECODE_SLOW": "1"}
        given["FASTDECODE_RDMA_WIRE"] = "veth" if wire is None else f"guest {number}"
        script = [
            *(f"export {name}={shlex.quote(value)}" for name, value in given.items()),
            f". {shlex.quote(str(HERE / 'devices.sh'))}",
            f"cd {shlex.quote(os.getcwd())}",
            f"exec {shlex.join(command)}",
        ]
        (folder / "command.sh").write_text("\n".join(script) + "\n")
        reading, writing = os.pipe()
        qemu, environment = _qemu(home)
        # Two CPUs, so that an end that polls does not keep the other end from running. Each is a NUMA node.
        arguments = [*qemu, "-accel", "tcg,thread=multi,tb-size=256", "-M", "pc", "-cpu", "max"]
        arguments += ["-smp", "2", "-m", "3G"]
        for i in range(2):
            arguments += ["-object", f"memory-backend-ram,id=ram{i},size=1536M"]
            arguments += ["-numa", f"node,nodeid={i},cpus={i},memdev=ram{i}"]
        arguments += ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
        arguments += ["-kernel", f"{home}/vmlinux", "-initrd", f"{home}/initrd.gz"]
        arguments += ["-append", _KERNEL_ARGUMENTS.format(tsc_khz=_tsc_khz())]
        arguments += ["-chardev", f"file,id=console,path={folder}/console", "-serial", "chardev:console"]
        arguments += ["-device", "virtio-serial-pci", "-chardev", f"file,id=out,path=/dev/fd/{writing}"]
        arguments += ["-device", "virtserialport,chardev=out,name=command.out"]
        arguments += _share("/", "host") + _share(home / "extra", "extra") + _share(folder, "out", read_only=False)
        if wire is not None:
            card = f"virtio-net-pci,netdev=wire,mac=52:54:00:00:00:{number:02x},romfile="
            arguments += ["-netdev", f"{wire},id=wire", "-device", card]
        self._process = subprocess.Popen(arguments, env=environment, stdin=subprocess.DEVNULL, pass_fds=[writing])
        os.close(writing)
        self._printed: list[bytes] = []
        self._relay = threading.Thread(target=self._print, args=(reading,))
        self._relay.start()

    def _print(self, reading: int) -> None:
        with os.fdopen(reading, "rb", 0) as pipe:
            while part := pipe.read(65536):
                self._printed.append(part)
                sys.stdout.write(part.decode(errors="replace"))
                sys.stdout.flush()

    @property
    def output(self) -> str:
        return b"".join(self._printed).decode(errors="replace")

    def says(self, text: str, timeout: float) -> bool:
        """Whether the guest prints `text` within `timeout` seconds and before it ends."""
        deadline = time.monotonic() + timeout
        while text not in self.output:
            if self._process.poll() is not None or time.monotonic() > deadline:
                return text in self.output
            time.sleep(0.05)
        return True

    def end(self, timeout: float = 0) -> tuple[int | None, str]:
        """Wait `timeout` seconds for the command, then kill the guest.

        Returns the command's exit status, or None if there is none, and the command's output.
        """
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._process.kill()
            self._process.wait()
            self._relay.join()
        with self._folder as name:
            try:
                return int(Path(name, "status").read_text()), self.output
            except (FileNotFoundError, ValueError):
                console = Path(name, "console")
                tail = console.read_text(errors="replace")[-6000:] if console.exists() else ""
                return None, f"{self.output}\nthe guest gave no exit status; its console ends with:\n{tail}"


#: The console of a guest whose kernel hangs has these words. If a link goes down under load, rxe_requester of Linux 6.1
#: may loop for ever.
_HUNG = "softlockup: hung tasks"


def run(command: list[str], timeout: float) -> tuple[int | None, str]:
    """Run `command` in a guest for `timeout` seconds at most; once more if the guest's kernel hangs. See Guest.end."""
    status, output = Guest(command).end(timeout)
    if status is None and _HUNG in output:
        print("the guest's kernel hung: the command runs again", flush=True)
        status, output = Guest(command).end(timeout)
    return status, output


def main() -> int:
    try:
        if sys.argv[1:] == ["prepare"]:
            prepare()
            return 0
        if sys.argv[1:2] == ["run"] and len(sys.argv) > 2:
            check()
            status, output = run(sys.argv[2:], 1800)
            if status is None:
                print(output[-4000:], file=sys.stderr)
            return 125 if status is None else status
    except NotHere as error:
        print(f"no RDMA virtual machine: {error}", file=sys.stderr)
        return 1
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
