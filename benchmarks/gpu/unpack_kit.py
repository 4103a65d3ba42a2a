"""Unpacks a kit (see README.md beside this file) into a folder for PYTHONPATH. Needs Python alone.

    python benchmarks/gpu/unpack_kit.py KIT SITE

A kit holds wheels, and ``fbgemm.xz``: FBGEMM's CUDA build with only one GPU's code. A pack is a table of its files and
the bytes that are not zero: little-endian length, JSON [[path, size, [[offset, length], ...]], ...], then the bytes.
"""

from __future__ import annotations

import json
import lzma
import struct
import sys
import zipfile
from pathlib import Path


def unpack(pack: Path, site: Path) -> int:
    """Unpacks a pack; returns the number of files.

    Raises:
        ValueError: the pack is damaged.
    """
    content = lzma.open(pack).read()
    (length,) = struct.unpack_from("<I", content)
    position = 4 + length
    files = json.loads(content[4:position])
    for name, size, extents in files:
        path = site / name
        if not path.resolve().is_relative_to(site.resolve()):
            raise ValueError(f"{pack}: {name} lies outside the folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.truncate(size)
            for offset, count in extents:
                file.seek(offset)
                file.write(content[position : position + count])
                position += count
    if position != len(content):
        raise ValueError(f"{pack}: {len(content) - position} bytes are left over; pack it again")
    return len(files)


def load_what_is_there(package: Path) -> None:
    """Keeps FBGEMM's import from failing over libraries that the pack left out, and tells it the torch of its 1.6."""
    text = package.read_text()
    if '"1.6":' not in text:
        text = text.replace('"1.5": "2.10",', '"1.6": "2.11",\n    "1.5": "2.10",')
    found = "    for library in libraries_to_load.get(target, []):"
    there = (
        "    for library in [name for name in libraries_to_load.get(target, []) "
        'if os.path.exists(os.path.join(os.path.dirname(__file__), name + ".so"))]:'
    )
    package.write_text(text.replace(found, there))


def main(kit: Path, site: Path) -> int:
    """Unpacks all that a kit holds."""
    site.mkdir(parents=True, exist_ok=True)
    wheels = sorted(kit.glob("*.whl"))
    for wheel in wheels:
        zipfile.ZipFile(wheel).extractall(site)
    pack = kit / "fbgemm.xz"
    if pack.exists():
        unpack(pack, site)
        load_what_is_there(site / "fbgemm_gpu" / "__init__.py")
    if not wheels and not pack.exists():
        print(f"{kit}: neither wheels nor fbgemm.xz; see benchmarks/gpu/README.md", file=sys.stderr)
        return 2
    print(f"unpacked {len(wheels)} wheels{' and FBGEMM' if pack.exists() else ''} into {site}")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
