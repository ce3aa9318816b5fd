"""The C extensions; everything else is declared in pyproject.toml.

One set of flags builds every file for the ABI's baseline. A file of vector kernels is empty where the architecture is
another (FD_X86, FD_ARM64), and names what it needs beyond the baseline in FD_BEGIN_TARGET(...). cpuid picks
among them at run time, so one wheel serves every machine of an architecture.
"""

import glob
import os
import re
import tomllib
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOMS = ("attention", "cache", "cpu", "decoder", "engine", "gpu", "linears", "py", "sampling")
KERNELS = [f"kernels/{room}" for room in ROOMS]
INCLUDES = [".", "kernels"]  # an include of another room's file names the room: "region/region.h", "cpu/parallel.h"


def files(folders: list[str], ending: str) -> list[str]:
    """The files with this ending in these folders, sorted."""
    return sorted(path for folder in folders for path in glob.glob(f"{folder}/*{ending}"))


def long_description() -> str:
    """README.md as a package index shows it: files and pictures of the repository have the address of the project's URL
    `Source`. Without that URL, links to files are plain text, and there are no pictures."""
    source = tomllib.loads(Path("pyproject.toml").read_text())["project"]["urls"].get("Source")

    def absolute(link: re.Match[str]) -> str:
        picture, text, target = link.groups()
        if source is None:
            return "" if picture else text
        return f"{picture}[{text}]({source}/{'raw' if picture else 'blob'}/HEAD/{target})"

    readme = re.sub(r"<!--.*?-->\n", "", Path("README.md").read_text(encoding="utf-8"))
    return re.sub(r"(!?)\[([^\]]+)\]\((?!https?:|#)([^)\s]+)\)", absolute, readme)


CFLAGS = ["-O3", "-std=gnu11", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter", "-ffp-contract=fast"]
# Extensions inherit CPython's -fwrapv, with which the kernels are slower: a counter that may wrap around cannot become
# a pointer.
CFLAGS += ["-fstrict-overflow"]
CFLAGS += ["-g0"]  # Debug information of unrolled kernels costs compile time and tells little.


class ParallelBuild(build_ext):
    """Compiles the files of an extension on all CPUs. setuptools alone compiles one file after the other.

    The files of vector kernels take longest and start first; the linker gets the object files in the sources' order.
    """

    def build_extensions(self) -> None:
        compile_files = self.compiler.compile

        def compile_in_parallel(sources: list[str], **options) -> list[str]:
            longest_first = sorted(sources, key=lambda path: "attention_avx" not in path)
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                jobs = {path: pool.submit(compile_files, [path], **options) for path in longest_first}
                try:
                    for job in as_completed(jobs.values()):
                        job.result()  # raises the compiler's error
                finally:
                    pool.shutdown(cancel_futures=True)
            return [object_file for path in sources for object_file in jobs[path].result()]

        self.compiler.compile = compile_in_parallel
        super().build_extensions()


setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    cmdclass={"build_ext": ParallelBuild},
    ext_modules=[
        Extension(
            "fastdecode.region._native",
            sources=files(["region"], ".c"),
            depends=files(["region"], ".h"),
            include_dirs=INCLUDES,
            extra_compile_args=CFLAGS,
        ),
        Extension(
            "fastdecode.kernels._native",
            sources=files(KERNELS, ".c"),
            depends=files([*KERNELS, "region"], ".h"),
            include_dirs=INCLUDES,
            extra_compile_args=CFLAGS,
            extra_link_args=["-pthread"],
        ),
        Extension(
            "fastdecode.transports._native",
            sources=files(["transports"], ".c"),
            depends=files(["transports", "region"], ".h"),
            include_dirs=INCLUDES,
            extra_compile_args=CFLAGS,
            extra_link_args=["-pthread"],
        ),
    ],
)
