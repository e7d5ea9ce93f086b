"""What is wrong with a wheel is found: a small module with the table of cpu/dispatch.c is built, sound and spoiled."""

import subprocess
import sysconfig
import zipfile
from pathlib import Path

import pytest
from check_wheel import LIBRARIES, MODULES, refusals, tag_of
from wheels import cmake_definitions

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TAG = tag_of("x86_64")
SOURCE = """
#include <Python.h>
#include <pthread.h>
#include "superadam.h"
#define EMPTY(isa) void superadam_kernel_##isa(int pass, const superadam_segment *segment, \\
    const superadam_coefficients *coefficients, int64_t first, int64_t last, int stream) { }
EMPTY(avx512) EMPTY(avx2) EMPTY(scalar)
void *thread_main(void *context) { return context; }
int start(void) { pthread_t thread; return pthread_create(&thread, NULL, thread_main, NULL); }
PyMODINIT_FUNC PyInit__kernels(void) { return PyLong_FromLong((long)dispatch_kernel(start()) + (long)(USED)); }
"""
"""`USED` is one thing more that it uses."""


def compiled(folder: Path, source: str, *options: str, glibc: str = "2.17") -> Path:
    """Return a module compiled from a source in `folder`, whose path it is given."""
    file = folder / "source.c"
    file.write_text(source)
    compiler = cmake_definitions("x86_64")["CMAKE_C_COMPILER"].replace("2.17", glibc).split(";")
    flags = ["-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-s", "-DPy_LIMITED_API=0x030b0000"]
    folders = [f"-I{sysconfig.get_path('include')}", f"-I{ROOT / 'cpu'}"]
    module = folder / "module.so"
    command = [*compiler, *flags, *folders, file, *options, "-o", module]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return module


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    modules = {}
    for module in MODULES:
        init = f"PyInit_{Path(module).name.partition('.')[0]}"
        source = f"#include <Python.h>\nPyMODINIT_FUNC {init}(void) {{ return PyLong_FromLong(0); }}"
        is_first = module == MODULES[0]
        folder = tmp_path_factory.mktemp(init)
        modules[module] = compiled(folder, SOURCE, "-DUSED=0", *SOUND) if is_first else compiled(folder, source)
    return modules


def wheel_of(folder: Path, modules: dict[str, Path], name: str = TAG, tag: str = TAG) -> Path:
    wheel = folder / f"superadam-1.0-{name}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for module, file in modules.items():
            archive.write(file, module)
        archive.writestr("superadam-1.0.dist-info/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n")
    return wheel


SOUND = ("-DSUPERADAM_SIMD", str(ROOT / "cpu" / "dispatch.c"), "-lpthread")
HELPER = '__attribute__((visibility("default"))) int helper(void) { return 1; }\n'
UNSTABLE, NOT_STABLE = "const char *PyUnicode_AsUTF8(void *);\n", "which is not in the stable ABI of 3.11"

NAME, BEYOND = MODULES[0], f"expected nothing beyond {', '.join(sorted(LIBRARIES))}"
FAULTS = {  # what comes before the source, what it uses, options of the compiler, and what is told
    "kernels": ("", "0", SOUND[1:], f"{NAME} has no avx512 kernels\n{NAME} has no avx2 kernels"),
    "glibc 2.34": ("", "0", SOUND, f"{NAME} needs GLIBC_2.34, expected at most 2.17"),
    "library": ("#include <dlfcn.h>\n", 'dlsym(0, "")', (*SOUND, "-ldl"), f"{NAME} needs libdl.so.2, {BEYOND}"),
    "export": (HELPER, "0", SOUND, f"{NAME} exports PyInit__kernels, helper, expected its PyInit function alone"),
    "rpath": ("", "0", (*SOUND, "-Wl,-rpath,$ORIGIN"), f"{NAME} has an RPATH"),
    "path": ("", "__FILE__", SOUND, f"{NAME} holds the path FOLDER/source.c"),
    "abi": (UNSTABLE, "PyUnicode_AsUTF8(0)", SOUND, f"_kernels.abi3.so uses PyUnicode_AsUTF8, {NOT_STABLE}"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_with_a_module(fault, sound, tmp_path):
    before, used, options, told = FAULTS[fault]
    glibc = "2.34" if "2.34" in fault else "2.17"
    module = compiled(tmp_path, before + SOURCE, f"-DUSED={used}", *options, glibc=glibc)
    found = list(refusals(wheel_of(tmp_path, sound | {NAME: module})))
    assert found == told.replace("FOLDER", str(tmp_path)).split("\n")


@pytest.mark.parametrize(
    ("name", "tag", "expected"),
    [
        ("cp311-abi3-linux_x86_64", TAG, f"its tag is cp311-abi3-linux_x86_64, expected {TAG} or {tag_of('aarch64')}"),
        (TAG, "cp311-abi3-linux_x86_64", f"its name says {TAG} and its metadata another tag"),
        (tag_of("aarch64"), tag_of("aarch64"), f"{MODULES[0]} is for EM_X86_64, expected EM_AARCH64"),
    ],
)
def test_a_wrong_tag(name, tag, expected, sound, tmp_path):
    assert next(refusals(wheel_of(tmp_path, sound, name, tag))) == expected


def test_a_sound_wheel_and_one_with_a_module_that_is_not_expected(sound, tmp_path):
    assert list(refusals(wheel_of(tmp_path, sound))) == []
    wheel = wheel_of(tmp_path, sound | {"superadam/more.so": sound[MODULES[0]]})
    assert next(refusals(wheel)).startswith(f"its modules are {', '.join(MODULES)}, superadam/more.so, expected")
