"""What a wheel must be to be released: `python tools/check_wheel.py WHEEL...` says what it is not, and ends with 1.

Reads files only, of any architecture; the stable ABI is judged by abi3audit.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from elftools.elf.constants import SH_FLAGS
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.relocation import RelocationSection

GLIBC = (2, 17)
"""The newest version of the C library that a wheel may need; its tag says so."""

LIBRARIES = {"libc.so.6", "libm.so.6", "libpthread.so.0"}

MODULES = (
    "superadam/_kernels.abi3.so",
    "superadam/host/_signals.abi3.so",
    "superadam/kernels/_places.abi3.so",
)

KERNELS = {"x86_64": ("avx512", "avx2"), "aarch64": ("sve_bf16", "sve", "neon")}
"""Vector kernels in the table of cpu/dispatch.c, for each architecture of which there are wheels."""

PATH = re.compile(rb"/[\w.+-]{2,}/[\w.+/-]{2,}")
"""An absolute one, of the machine that built a module."""

MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}


def tag_of(architecture: str) -> str:
    """Return the tag of the wheel for an architecture."""
    return f"cp311-abi3-manylinux_{GLIBC[0]}_{GLIBC[1]}_{architecture}"


def refusals(wheel: Path) -> Iterator[str]:
    """Yield what is wrong with a wheel, each in one sentence."""
    tag = wheel.stem.split("-", 2)[2]
    architecture = next((name for name in KERNELS if tag == tag_of(name)), None)
    if architecture is None:
        yield f"its tag is {tag}, expected {' or '.join(map(tag_of, KERNELS))}"
        return
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (metadata,) = (data.decode() for name, data in files.items() if name.endswith(".dist-info/WHEEL"))
    if re.findall(r"^Tag: (.+)$", metadata, re.MULTILINE) != [tag]:
        yield f"its name says {tag} and its metadata another tag"
    modules = {name: data for name, data in files.items() if ".so" in name}
    if sorted(modules) != sorted(MODULES):
        yield f"its modules are {', '.join(sorted(modules))}, expected {', '.join(MODULES)}"
    for name, data in modules.items():
        yield from (f"{name} {what}" for what in refusals_of_module(name, data, architecture))
    command = [sys.executable, "-m", "abi3audit", "--report", str(wheel)]
    report = json.loads(subprocess.run(command, check=False, capture_output=True, text=True).stdout)
    for module in report["specs"][str(wheel)]["wheel"]:
        if beyond := [*module["result"]["non_abi3_symbols"], *module["result"]["future_abi3_objects"]]:
            yield f"{module['name']} uses {', '.join(beyond)}, which is not in the stable ABI of 3.11"


def refusals_of_module(name: str, data: bytes, architecture: str) -> Iterator[str]:
    """Yield what is wrong with a module of a wheel."""
    elf = ELFFile(io.BytesIO(data))
    if elf["e_machine"] != MACHINES[architecture]:
        yield f"is for {elf['e_machine']}, expected {MACHINES[architecture]}"
        return
    for section in elf.iter_sections():
        if isinstance(section, DynamicSection):
            needed = {tag.needed for tag in section.iter_tags("DT_NEEDED")}
            if beyond := needed - LIBRARIES:
                yield f"needs {', '.join(sorted(beyond))}, expected nothing beyond {', '.join(sorted(LIBRARIES))}"
            if any(tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH") for tag in section.iter_tags()):
                yield "has an RPATH"
        elif isinstance(section, GNUVerNeedSection):
            versions = [need.name for _, needs in section.iter_versions() for need in needs]
            if newer := [one for one in versions if one.startswith("GLIBC_") and glibc_of(one) > GLIBC]:
                yield f"needs {', '.join(newer)}, expected at most {GLIBC[0]}.{GLIBC[1]}"
    symbols = elf.get_section_by_name(".dynsym").iter_symbols()
    exported = {one.name for one in symbols if one.name and one["st_shndx"] != "SHN_UNDEF"}
    if exported != {f"PyInit_{Path(name).name.split('.')[0]}"}:
        yield f"exports {', '.join(sorted(exported))}, expected its PyInit function alone"
    for section in elf.iter_sections():
        if not section["sh_flags"] & SH_FLAGS.SHF_EXECINSTR:  # whose bytes look like anything
            yield from (f"holds the path {path.decode()}" for path in PATH.findall(section.data()))
    if name == MODULES[0]:
        yield from (
            f"has no {kernel} kernels" for kernel in KERNELS[architecture] if kernel not in kernels_of(elf, data)
        )


def glibc_of(version: str) -> tuple[int, ...]:
    """Return the numbers in a version of glibc's symbols; its private ones count as newer than all."""
    return tuple(map(int, re.findall(r"\d+", version))) or (99,)


def kernels_of(elf: ELFFile, data: bytes) -> set[str]:
    """Return the names in the table of cpu/dispatch.c that a pointer follows: it is null where there are no kernels."""
    pointers = {
        relocation["r_offset"]: relocation["r_addend"]
        for section in elf.iter_sections()
        if isinstance(section, RelocationSection) and section.is_RELA()
        for relocation in section.iter_relocations()
    }
    texts = (next(elf.address_offsets(to), None) for place, to in pointers.items() if place + 8 in pointers)
    return {data[at : data.index(0, at)].decode(errors="replace") for at in texts if at is not None}


def main() -> int:
    """Check the wheels that the command names."""
    found = [f"{path}: {what}" for path in map(Path, sys.argv[1:]) for what in refusals(path)]
    sys.stderr.writelines(f"{line}\n" for line in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
