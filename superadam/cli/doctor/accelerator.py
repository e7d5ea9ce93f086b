"""Probes of GPUs, their driver, and their link to the CPU's memory, through nvidia-smi and torch.

They create no CUDA context beyond what torch's device properties need.
"""

from __future__ import annotations

import re
import subprocess

from superadam.cli.doctor.finding import Finding, Status
from superadam.host.machine import Host

LINK_FIELDS = "index,name,pci.bus_id,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max"
GIGABYTES_PER_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.97, 5: 3.94, 6: 7.56}
"""GB/s in one direction of one PCIe lane, by generation, after line coding (PCI-SIG)."""


def driver(host: Host) -> Finding:
    """Report the GPU driver, if there is one."""
    text = host.read_or("/proc/driver/nvidia/version", "")
    match = re.search(r"\b(\d{3}\.\d+(\.\d+)?)\b", text)
    if match:
        return Finding(f"NVIDIA {match[1]}", values={"nvidia": match[1]})
    amd = host.read_or("/sys/module/amdgpu/version", "")
    if amd:
        return Finding(f"amdgpu {amd}", values={"amdgpu": amd})
    return Finding("none; superadam needs none")


def gpus(host: Host) -> Finding:
    """Report the devices that torch sees, and whether there are some that it does not."""
    import torch

    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        values = {
            "devices": [
                {"name": d.name, "memory_bytes": d.total_memory, "capability": f"{d.major}.{d.minor}"} for d in devices
            ]
        }
        names: dict[str, int] = {}
        for device in devices:
            text = f"{device.name}, {device.total_memory / (1 << 30):.0f} GiB, capability {device.major}.{device.minor}"
            names[text] = names.get(text, 0) + 1
        detail = "; ".join(f"{count} x {text}" if count > 1 else text for text, count in names.items())
        if any(getattr(device, "is_integrated", False) for device in devices):  # GB10, MI300A
            detail += "; its memory is the host's, where offloading saves none"
            return Finding(detail, "train with torch.optim.AdamW(fused=True)", values)
        return Finding(detail, values=values)
    if host.path("/proc/driver/nvidia/version").exists():
        if torch.version.cuda is None:
            detail = f"there is a driver, but torch {torch.__version__} was built without CUDA"
            remedy = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128"
        else:
            detail = f"there is a driver, but torch (CUDA {torch.version.cuda}) finds no device it can use"
            hidden = "CUDA_VISIBLE_DEVICES" in host.environment
            remedy = "unset CUDA_VISIBLE_DEVICES" if hidden else "nvidia-smi --list-gpus"
        return Finding(detail, remedy, {"devices": []})
    return Finding("none; steps run on the CPU alone", values={"devices": []})


def link(host: Host) -> Finding:
    """Report how each GPU reaches the CPU's memory: PCIe generation and lanes, or NVLink-C2C."""
    try:
        rows = host.run(["nvidia-smi", f"--query-gpu={LINK_FIELDS}", "--format=csv,noheader"]).strip().splitlines()
    except FileNotFoundError:
        if host.path("/proc/driver/nvidia/version").exists():
            return Finding("nvidia-smi is not installed; it comes with the driver", fault=Status.UNKNOWN)
        return Finding("none", values={"links": []})
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(f"nvidia-smi failed: {error}", fault=Status.UNKNOWN)
    links: list[dict[str, object]] = []
    details, remedy = [], ""
    coherent = _coherent_rate(host)
    for row in rows:
        index, name, bus, generation, width, widest = (word.strip() for word in row.split(","))
        if coherent:
            links.append({"gpu": index, "kind": "NVLink-C2C", "gigabytes_per_second": coherent})
            details.append(f"GPU {index}: NVLink-C2C, {coherent:.0f} GB/s each way")
            continue
        if not (generation.isdecimal() and width.isdecimal()):
            links.append({"gpu": index, "kind": None})
            details.append(f"GPU {index} ({name}): not reported")
            continue
        rate = GIGABYTES_PER_LANE.get(int(generation), 0.0) * int(width)
        lanes = {"generation": int(generation), "width": int(width), "gigabytes_per_second": rate or None}
        links.append({"gpu": index, "kind": "PCIe", "bus": bus, **lanes})
        details.append(f"GPU {index}: PCIe {generation} x{width}, {rate:.0f} GB/s each way")
        if widest.isdecimal() and int(width) < int(widest):
            remedy = "move the card to a slot with all lanes"
            details[-1] += f", of x{widest}"
    if not details:
        return Finding("nvidia-smi lists no device", fault=Status.UNKNOWN)
    return Finding("; ".join(details), remedy, {"links": links})


def _coherent_rate(host: Host) -> float:
    """Return the GB/s of one GPU's NVLink-C2C links together, or 0 where there are none."""
    try:
        text = host.run(["nvidia-smi", "c2c", "-s", "-i", "0"])
    except (OSError, subprocess.SubprocessError):
        return 0.0
    return sum(float(rate) for rate in re.findall(r"C2C Link \d+\s*:\s*([\d.]+)\s*GB/s", text))
