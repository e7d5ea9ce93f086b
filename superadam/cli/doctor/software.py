"""Probes of Python packages: versions of superadam, torch and triton."""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, version

from superadam.cli.doctor.finding import Finding, Status
from superadam.host.machine import Host

OLDEST_TORCH = (2, 10)
"""As in the package's dependencies."""


def superadam_version(host: Host) -> Finding:
    """Report superadam, Python and the system they run on."""
    values = {"superadam": version("superadam"), "python": platform.python_version()}
    values |= {"system": platform.system(), "machine": platform.machine()}
    detail = "{superadam}, Python {python}, {system} {machine}".format(**values)
    return Finding(detail, values=values)


def torch_version(host: Host) -> Finding:
    """Report torch, and whether it is new enough."""
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    if torch.version.hip:
        build = f"HIP {torch.version.hip}"
    capability = torch.backends.cpu.get_cpu_capability()
    values = {"version": torch.__version__, "build": build, "capability": capability}
    detail = f"{torch.__version__}, {build}, {capability} kernels"
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return Finding(detail, f"pip install 'torch>={oldest}'", values, Status.BROKEN)
    return Finding(detail, values=values)


def triton_version(host: Host) -> Finding:
    """Report triton, which only buckets on a GPU need."""
    try:
        found = version("triton")
    except PackageNotFoundError:
        import torch

        remedy = "pip install triton" if torch.cuda.is_available() else ""
        return Finding("not installed; only kernels on a GPU need it", remedy, {"version": None})
    return Finding(found, values={"version": found})
