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
    segment = make_segment(0, length, native.Dtype.BFLOAT16, native.Dtype.FLOAT16, norm=True)
    job = Job(native.Pass.UPDATE, [segment], [Coefficients.at_step(hyper, 3, 0.37)])
    expected = job.expected()
    job.run(native.active_isa(), threads=2)
    job.check(expected)


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
