"""Makes what the guest boots from: a kernel without compression and an initramfs. Standard library only."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import re
import struct
import zlib
from pathlib import Path

#: With what they depend on: the guest's disks (9p, overlay), its wires, and RDMA on them. rdma_rxe asks for the crypto
#: "crc32" in a way that would need modprobe; the generic one is also the fastest under emulation.
MODULES = ["virtio_pci", "virtio_console", "9p", "9pnet_virtio", "overlay", "virtio_net", "veth", "sch_netem"]
MODULES += ["ib_uverbs", "rdma_ucm", "rdma_rxe", "crc32_generic"]


def unpack_kernel(vmlinuz: bytes) -> bytes:
    """The ELF kernel within a bzImage. QEMU boots it directly, and nothing is unpacked under emulation."""
    for magic, unpack in ((b"\xfd7zXZ\0", lzma.LZMADecompressor), (b"\x1f\x8b\x08", lambda: zlib.decompressobj(31))):
        for found in re.finditer(re.escape(magic), vmlinuz):
            try:
                kernel = unpack().decompress(vmlinuz[found.start() :])
            except (lzma.LZMAError, zlib.error):
                continue
            if kernel.startswith(b"\x7fELF"):
                return kernel
    raise ValueError("no kernel compressed by xz or gzip was found")


class _Modules:
    """A kernel's modules by name, and in which order they load."""

    def __init__(self, tree: Path):
        (root,) = (tree / "lib/modules").iterdir()
        self._paths = {}
        for path in root.rglob("*.ko*"):
            self._paths[self._plain(path.name.split(".ko")[0])] = path
        built_in = (root / "modules.builtin").read_text().splitlines()
        self._seen = {self._plain(Path(line).stem) for line in built_in}
        self.ordered: dict[str, bytes] = {}

    @staticmethod
    def _plain(name: str) -> str:
        return name.replace("-", "_")

    def need(self, name: str) -> None:
        name = self._plain(name)
        if name in self._seen:
            return
        self._seen.add(name)
        data = self._paths[name].read_bytes()
        if self._paths[name].suffix == ".xz":
            data = lzma.decompress(data)
        info = _modinfo(data)
        before = [x for line in info.get("depends", []) for x in line.split(",") if x]
        for line in info.get("softdep", []):
            if line.startswith("pre:"):
                before += [x for x in line[4:].split() if self._plain(x) in self._paths]
        for other in before:
            self.need(other)
        self.ordered[name] = data


def _modinfo(module: bytes) -> dict[str, list[str]]:
    """The section .modinfo of a 64-bit ELF object."""
    (at,) = struct.unpack_from("<Q", module, 0x28)
    size, n, names = struct.unpack_from("<HHH", module, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", module, at + i * size) for i in range(n)]
    info: dict[str, list[str]] = {}
    for name, _, _, _, start, length in sections:
        begin = sections[names][4] + name
        if module[begin : module.index(b"\0", begin)] != b".modinfo":
            continue
        for entry in module[start : start + length].split(b"\0"):
            key, separator, value = entry.decode("latin1").partition("=")
            if separator:
                info.setdefault(key, []).append(value)
    return info


class _Cpio:
    """An archive in cpio's "newc" format."""

    def __init__(self) -> None:
        self._out = io.BytesIO()
        self._n = 0
        self._folders: set[str] = set()

    def add(self, name: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)) -> None:
        folder = os.path.dirname(name)
        if folder and folder not in self._folders:
            self.folder(folder)
        self._entry(name, mode, data, device)

    def folder(self, name: str) -> None:
        self._folders.add(name)
        self._entry(name, 0o040755, b"", (0, 0))

    def _entry(self, name: str, mode: int, data: bytes, device: tuple[int, int]) -> None:
        self._n += 1
        path = name.encode() + b"\0"
        fields = (self._n, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(path), 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + path
        for part in (head, data):
            self._out.write(part + b"\0" * (-len(part) % 4))

    def finish(self) -> bytes:
        self._entry("TRAILER!!!", 0, b"", (0, 0))
        return self._out.getvalue()


def make_initramfs(kernel: Path, busybox: bytes, init: bytes) -> bytes:
    """A gzipped initramfs that runs `init`; `kernel` is the folder of an unpacked linux-image package."""
    modules = _Modules(kernel)
    for name in MODULES:
        modules.need(name)
    archive = _Cpio()
    archive.add("bin/busybox", 0o100755, busybox)
    archive.add("init", 0o100755, init)
    archive.add("dev/console", 0o020600, device=(5, 1))
    archive.add("modules", 0o100644, "".join(f"{name}\n" for name in modules.ordered).encode())
    for name, data in modules.ordered.items():
        archive.add(f"m/{name}.ko", 0o100644, data)
    for name in ("proc", "sys", "host", "extra", "rw", "root"):
        archive.folder(name)
    return gzip.compress(archive.finish(), 6)
