"""A program: loads a build of the kernels that this process was given, runs them, and says in JSON what it found.

Usage: python kernels_elsewhere.py KERNELS.so DIRECTORY..., with the directories of the package. Tests run it with
kernels that lack an instruction set, or in an emulator of a CPU that lacks one. It imports `kernels.native` without
`superadam/__init__.py`, and without torch, which takes long in an emulator: of that, the modules only want the name of
`Tensor`.
"""

import importlib.util
import json
import logging
import sys
import types
from pathlib import Path
from typing import Any


def load_package(kernels: str, directories: list[str]) -> None:
    package = types.ModuleType("superadam")
    package.__path__ = directories
    sys.modules["superadam"] = package
    torch: Any = types.ModuleType("torch")
    torch.Tensor = type("Tensor", (), {})
    sys.modules["torch"] = torch
    spec: Any = importlib.util.spec_from_file_location("superadam._kernels", kernels)
    module = importlib.util.module_from_spec(spec)
    sys.modules["superadam._kernels"] = module
    spec.loader.exec_module(module)


def check_bits() -> None:
    """Compare an update with every output, in two threads, with the oracle's."""
    sys.path.append(str(Path(__file__).parents[1]))
    from support.kernel_arrays import Job, make_segment

    from superadam.kernels import native
    from superadam.kernels.hyperparameters import Coefficients, Hyperparameters

    hyper = Hyperparameters(1e-3, 0.9, 0.999, 1e-8, 0.1, amsgrad=True, maximize=True, decoupled_weight_decay=False)
    length = 2 * 16 * native.CHUNK + 77  # enough for two threads
<<<<<<< HEAD
    g, p, m, v, vmax = (rng.standard_normal(length).astype(np.float32) for _ in range(5))
    state = {"master": p, "exp_avg": m, "exp_avg_sq": np.abs(v), "max_exp_avg_sq": np.abs(vmax)}
    arrays = {"gradient": formula.narrow_bfloat16(g), **state, "out": np.zeros(length, np.uint16)}
    arrays |= {
        "sums": np.zeros(native.chunk_count(length)),
        "nonfinite": np.zeros(native.chunk_count(length), np.int64),
    }
    g = formula.widen_bfloat16(arrays["gradient"])
    p, m, v, vmax = formula.adam_formula(k, g, m, np.abs(v), np.abs(vmax), p)
    wanted = {"master": p, "exp_avg": m, "exp_avg_sq": v, "max_exp_avg_sq": vmax}
    wanted |= {"out": formula.narrow_float16(p), "sums": formula.chunk_sums(g)}

    table = np.zeros(1, native.SEGMENT)
    for name, array in arrays.items():
        table[name] = array.ctypes.data
    table["length"] = length
    table["gradient_dtype"], table["out_dtype"] = native.Dtype.BFLOAT16, native.Dtype.FLOAT16
    native.run(native.Pass.UPDATE, table, np.array([k.row()], native.COEFFICIENTS), threads=2)
    return sum(int(np.count_nonzero(arrays[name] != values)) for name, values in wanted.items())
=======
    segment = make_segment(0, length, native.Dtype.BFLOAT16, native.Dtype.FLOAT16, norm=True)
    job = Job(native.Pass.UPDATE, [segment], [Coefficients.at_step(hyper, 3, 0.37)])
    expected = job.expected()
    job.run(native.active_isa(), threads=2)
    job.check(expected)
>>>>>>> d-support


def main() -> None:
    kernels, *directories = sys.argv[1:]
    load_package(kernels, directories)
    warnings: list[str] = []
    logging.getLogger("superadam").addFilter(lambda record: warnings.append(record.getMessage()) or True)
    from superadam.kernels import native

    report = {
        "known": native.known_isas(),
        "available": native.available_isas(),
        "active": native.active_isa(),
        "warnings": warnings,
    }
    check_bits()
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
