"""Every variant of the kernels of superadam.gpu that can be launched, and what Triton compiles it to, without a GPU.

A variant is launched by the function that production calls, on tensors of the CPU, with a stand-in for the kernel that
notes the launch. `Compilers` compiles what was noted in processes of its own, because the kernels of the tests' process
may be interpreted.
"""

import contextlib
import importlib
import io
import itertools
import os
import pickle
import pkgutil
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from support.kernel_arrays import FORMATS

from superadam import gpu
from superadam.kernels.dtypes import DTYPES
from superadam.kernels.hyperparameters import Coefficients, Hyperparameters
from superadam.kernels.native import CHUNK, Flag, Format, chunk_count
from superadam.kernels.resident_step import ResidentStep

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
"""Arguments of Triton's `GPUTarget`: A100, H100 and H200, B200, MI300."""

KERNELS = {
    name: module
    for info in pkgutil.iter_modules(gpu.__path__)
    for module in [importlib.import_module(f"superadam.gpu.{info.name}")]
    for name in vars(module)
    if name.endswith("_kernel")
}
"""Modules of all kernels, by the kernels' names."""

# ---- launches that production makes --------------------------------------------------------------------------------


def tensor(numel: int, dtype: torch.dtype, aligned: bool = True) -> torch.Tensor:
    whole = torch.zeros(numel + 64, dtype=dtype)
    return whole[-whole.data_ptr() % 64 // dtype.itemsize + (not aligned) :][:numel]


def _coefficients() -> dict[Flag, Coefficients]:
    """Return coefficients of a step for each set of flags that hyper-parameters and clipping lead to."""
    choices = [(False, True) if field.type == "bool" else (0.0, 0.5) for field in fields(Hyperparameters)]
    found = {}
    for values in itertools.product(*choices):
        for scale, rounds in ((1.0, False), (0.5, False), (0.5, True)):
            coefficients = Coefficients.at_step(Hyperparameters(*values), 1, scale, rounds=rounds)
            found[coefficients.flags] = coefficients
    return dict(sorted(found.items()))


COEFFICIENTS = _coefficients()


def stored_dtypes(real: torch.dtype, form: Format) -> dict[str, torch.dtype]:
    """Return the dtype of each tensor of a step's state but max_exp_avg_sq, which is as exp_avg."""
    dtypes = {"master": real, "exp_avg": real, "exp_avg_sq": real}
    if Format.MASTER_24BIT in form:
        dtypes |= {"master": torch.int16, "master_low": torch.uint8}
    if Format.MOMENTS_8BIT in form:
        dtypes |= dict.fromkeys(("exp_avg", "exp_avg_sq", "exp_avg_exponents", "exp_avg_sq_exponents"), torch.uint8)
    elif Format.MOMENTS_BFLOAT16 in form:
        dtypes |= dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.bfloat16)
    return dtypes


def launch_adam(
    gradient: torch.dtype, parameter: torch.dtype, form: Format, flags: Flag, aligned: bool, numel: int = 64
) -> None:
    """Make a step with state of the dtype that belongs to the parameter, stored as `form`."""
    dtypes = stored_dtypes(torch.float64 if parameter == torch.float64 else torch.float32, form)
    kept = {name: tensor(numel // 64 if "exponents" in name else numel, dtype) for name, dtype in dtypes.items()}
    largest = tensor(numel, dtypes["exp_avg"]) if Flag.AMSGRAD in flags else None
    arrays = {"gradient": tensor(numel, gradient), "parameter": tensor(numel, parameter, aligned)}
    gpu.update([ResidentStep(**kept, max_exp_avg_sq=largest, **arrays, coefficients=0)], [COEFFICIENTS[flags]])


def launch_pack(source: torch.dtype, link: torch.dtype, sums: bool, aligned: bool, numel: int = CHUNK + 1) -> None:
    norm = [tensor(chunk_count(numel), dtype) if sums else None for dtype in (torch.float64, torch.int64)]
    gpu.pack_gradients([tensor(numel, source)], [0], tensor(numel, link, aligned), *norm)


def launch_scatter(dtype: torch.dtype, aligned: bool, numel: int = 10) -> None:
    gpu.scatter_values([tensor(numel, dtype)], [tensor(numel, dtype, aligned)])


LAUNCHES = {"adam_kernel": launch_adam, "pack_kernel": launch_pack, "scatter_kernel": launch_scatter}

_BOTH = (False, True)

ADAM = [
    (gradient, parameter, form, flags, aligned)
    for gradient, parameter, form, flags, aligned in itertools.product(DTYPES, DTYPES, FORMATS, COEFFICIENTS, _BOTH)
    if (gradient == torch.float64) == (parameter == torch.float64)
    and not (form and gradient == torch.float64)
    and not (Format.MOMENTS_8BIT in form and Flag.AMSGRAD in flags)
    and (form <= Format.MOMENTS_BFLOAT16 or gradient == parameter == torch.bfloat16)  # compilers take their time
]
PACK = [
    (source, link, sums, aligned)
    for source, link, sums, aligned in itertools.product(DTYPES, DTYPES, _BOTH, _BOTH)
    if (source == torch.float64) == (link == torch.float64)
]
SCATTER = list(itertools.product(DTYPES, _BOTH))


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel that was noted instead of made."""

    name: str
    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]


@contextlib.contextmanager
def noted_launches() -> Iterator[list[Launch]]:
    """Yield the launches that are made meanwhile, also with tensors of the CPU."""
    launches: list[Launch] = []

    class Noted:
        def __init__(self, name: str, kernel: Any) -> None:
            self._name, self._kernel = name, kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **constants: launches.append(
                Launch(self._name, self._kernel, grid, arguments, constants)
            )

    with contextlib.ExitStack() as stack:
        for name, module in KERNELS.items():
            stack.enter_context(mock.patch.object(module, name, Noted(name, getattr(module, name))))
            stack.enter_context(mock.patch.object(module, "obstacle", return_value=None, create=True))
        yield launches


# ---- what they are compiled to -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Code:
    """What a variant was compiled to."""

    instructions: Counter[str]  # how often each occurs: names of PTX, or of amdgcn without suffixes for their encoding
    threads: int  # of a program
    relaxed: int  # operations in LLVM's IR that may be reassociated, contracted, or approximated
    keeps_denormals: bool  # False where the hardware's mode flushes them or does not round to nearest even
    spilled: int  # bytes of registers that each thread keeps in memory
    ptx: str  # for NVIDIA's assembler
    shared: int  # bytes of memory that the threads of a program share
    constants: dict[str, Any]  # of the launch

    def count(self, pattern: str) -> int:
        return sum(number for name, number in self.instructions.items() if re.fullmatch(pattern, name))

    def count_pairs(self, pattern: str, pair: str) -> int:
        """Return how many match a pattern, those that match the second one, which do two at once, twice."""
        return self.count(pattern) + 2 * self.count(pair)


_RELAXED = re.compile(r"= (?:tail )?(?:f\w+|call|select|phi) (?:fast|nnan|ninf|nsz|arcp|contract|afn|reassoc)\b")
_MODES = {"round_mode_32": 0, "round_mode_16_64": 0, "denorm_mode_32": 3, "denorm_mode_16_64": 3}


def _read(compiled: Any, assembler: str, constants: dict[str, Any]) -> Code:
    """Return what counts of a kernel that Triton has compiled, with what NVIDIA's assembler said."""
    metadata, relaxed = compiled.metadata, len(_RELAXED.findall(compiled.asm["llir"]))
    threads = metadata.num_warps * metadata.target.warp_size
    if metadata.target.backend == "cuda":
        names = re.findall(r"^\s+(?:@!?%\w+\s+)?([a-z]\w*(?:\.\w+(?:::\w+)*)+)\s", compiled.asm["ptx"], re.M)
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill", assembler)))
        keeps_denormals = True  # else there is an instruction that `support.ptx` does not know
    else:
        # A half is widened on the way into v_fma_mix, which makes products (of which -0 is subtracted) and sums, too.
        text = re.sub(r"v_fma_mix(?=_f32 .*\bneg\(0\))", "v_mul_mix", compiled.asm["amdgcn"])
        names = re.findall(r"^\t([a-z]\w+?)(?:_e32|_e64|_sdwa|_dpp)*(?:\s|$)", text, re.M)
        value = {name: int(number) for name, number in re.findall(r"^\s+\.(\w+)[: ]\s*(\d+)$", text, re.M)}
        # Scalar registers are spilled into lanes of vector registers, without memory.
        spilled = value["private_segment_fixed_size"] + 4 * value["vgpr_spill_count"]
        keeps_denormals = all(value[f"amdhsa_float_{mode}"] == expected for mode, expected in _MODES.items())
        keeps_denormals &= not any(re.match(r"s_(setreg|denorm|round)", name) for name in names)
    ptx = compiled.asm.get("ptx", "")
    return Code(Counter(names), threads, relaxed, keeps_denormals, spilled, ptx, metadata.shared, constants)


class Request(NamedTuple):
    """A target, a kernel, and arguments of its function in `LAUNCHES`."""

    target: str
    kernel: str
    arguments: tuple[Any, ...]


def _compile_all() -> None:
    """Read requests from standard input, and write their `Code`s to standard output."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    targets = {name: GPUTarget(*arguments) for name, arguments in TARGETS.items()}
    active = mock.Mock()
    driver.set_active(active)
    codes = []
    for target, name, arguments in pickle.load(sys.stdin.buffer):
        active.get_current_device.return_value = target
        active.get_current_target.return_value = targets[target]
        with noted_launches() as launches:
            LAUNCHES[name](*arguments)
        (launch,) = launches
        assert launch.name == name
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as log:
            warnings.simplefilter("error")
            compiled = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.constants)
        constants = {name: value for name, value in launch.constants.items() if name != "maxnreg"}  # of ptxas alone
        codes.append(_read(compiled, log.getvalue(), constants))
    pickle.dump(codes, sys.stdout.buffer)


def can_compile() -> bool:
    """Whether this Triton brings compilers for all `TARGETS`."""
    if gpu.language.MISSING is not None:
        return False
    from triton.backends import backends

    return {"nvidia", "amd"} <= backends.keys()


class Compilers:
    """Compiles variants ahead of when they are asked for, in two processes at once, `together` in each.

    The cache is an empty folder for Triton's files.
    """

    def __init__(self, requests: Sequence[Request], cache: Path, together: int = 64) -> None:
        self._cache = cache
        self._threads = ThreadPoolExecutor(2)
        self._parts: dict[Request, tuple[Future[list[Code]], int]] = {}
        for begin in range(0, len(requests), together):
            part = requests[begin : begin + together]
            codes = self._threads.submit(self._compile, part)
            self._parts.update({request: (codes, number) for number, request in enumerate(part)})

    def code(self, request: Request) -> Code:
        codes, number = self._parts[request]
        return codes.result()[number]

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _compile(self, requests: Sequence[Request]) -> list[Code]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
        environment |= {"TRITON_CACHE_DIR": str(self._cache), "TRITON_DUMP_PTXAS_LOG": "1", "TRITON_INTERPRET": "0"}
        environment |= {"TRITON_DEBUG": "1"}  # which adds no checks of sums that are to wrap
        path = filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
        done = subprocess.run(
            [sys.executable, "-c", "from support import gpu_variants; gpu_variants._compile_all()"],
            input=pickle.dumps(requests),
            env=environment | {"PYTHONPATH": os.pathsep.join(path)},
            check=False,
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr.decode()
        return pickle.loads(done.stdout)
