"""Prepare the demo model's text: six novels by Jane Austen (public domain).

The novels come from the R package `janeaustenr`, in Debian as
`r-cran-janeaustenr`.  The package's lazy-load database
(`Rdata.rdx`/`Rdata.rdb`) is read directly, without R, by the PyPI package
`rdata`::

    apt-get download r-cran-janeaustenr
    dpkg -x r-cran-janeaustenr_*.deb janeaustenr
    pip install rdata
    python scripts/demo_model/corpus.py janeaustenr austen

writes `austen/train.txt`, `austen/dev.txt` and `austen/heldout.txt`.
Paragraphs are unwrapped to one line each, chapters become documents, and
headings, italics marks and editorial notes are dropped.
"""

from __future__ import annotations

import argparse
import gzip
import re
import warnings
import zlib
from pathlib import Path
from typing import Any

#: Separates two chapters in a text file.
CHAPTER_BREAK = "\n\n\n"

#: Chapters that are not trained on: (novel, number of its last chapters).
HELDOUT = ("persuasion", 6)
DEV = ("northangerabbey", 4)

_HEADING = re.compile(r"^(chapter|volume) +([ivxlc]+|\d+)\.?$", re.IGNORECASE)
_ENDING = re.compile(r"^(finis|the end)\.?$|^A NOTE ON THE TEXT", re.IGNORECASE)
_NOTE = re.compile(r"^\[.*volume|^[* ]+$|^\*Vide ", re.IGNORECASE)


def read_novels(package: Path) -> dict[str, list[str]]:
    """The lines of each novel in an unpacked `r-cran-janeaustenr`, by the novel's name."""
    import rdata

    def unserialize(raw: bytes) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "unknown file type: assumed RDS"
            return rdata.conversion.convert(rdata.parser.parse_data(raw))

    index_file = next(package.rglob("data/Rdata.rdx"))
    index = unserialize(gzip.decompress(index_file.read_bytes()))["variables"]
    database = index_file.with_suffix(".rdb").read_bytes()
    novels = {}
    for name, (offset, length) in index.items():
        # Each entry: 4 bytes of uncompressed length, then a zlib stream.
        entry = zlib.decompress(database[offset + 4 : offset + length])
        novels[str(name)] = [str(line) for line in unserialize(entry)]
    return novels


def chapters(lines: list[str]) -> list[str]:
    """Split the lines of a novel into chapters. Each paragraph becomes one line, and a blank line separates two."""
    result: list[str] = []
    paragraphs: list[str] = []
    paragraph: list[str] = []
    started = False
    for line in [*lines, "FINIS"]:
        line = line.strip()
        boundary = _HEADING.match(line) or _ENDING.match(line)
        if paragraph and (boundary or not line):
            joined = re.sub(r" +", " ", " ".join(paragraph))
            if not _NOTE.match(joined):
                paragraphs.append(joined)
            paragraph = []
        if boundary:
            if paragraphs:
                result.append("\n\n".join(paragraphs))
                paragraphs = []
            if _ENDING.match(line):
                break
            started = True
        elif line and started:
            paragraph.append(line.replace("_", "").replace(",* ", ", "))
    return result


def split(novels: dict[str, list[str]]) -> dict[str, list[str]]:
    """The chapters of "train", "dev" and "heldout"."""
    parts: dict[str, list[str]] = {"train": [], "dev": [], "heldout": []}
    for name in sorted(novels):
        text = chapters(novels[name])
        for part, (novel, count) in (("heldout", HELDOUT), ("dev", DEV)):
            if name == novel:
                parts[part] += text[-count:]
                text = text[:-count]
        parts["train"] += text
    return parts


def load(path: Path) -> list[str]:
    """The chapters in a file that `main` wrote."""
    return path.read_text(encoding="utf-8").rstrip("\n").split(CHAPTER_BREAK)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", type=Path, help="unpacked r-cran-janeaustenr")
    parser.add_argument("out", type=Path, help="directory for the text files")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for part, text in split(read_novels(args.package)).items():
        joined = CHAPTER_BREAK.join(text) + "\n"
        (args.out / f"{part}.txt").write_text(joined, encoding="utf-8")
        print(f"{part}: {len(text)} chapters, {len(joined.encode()):,} bytes")


if __name__ == "__main__":
    main()
