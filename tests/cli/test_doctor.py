"""The doctor: every probe on made-up machines, and the whole report on this one."""

import json
import os
import resource
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.machines import machine

from superadam.cli import main as cli
from superadam.cli.bench.arrays import PassArrays
from superadam.cli.doctor import accelerator, memory, processor, report, software
from superadam.cli.doctor.diagnosis import PROBES, diagnose
from superadam.cli.doctor.finding import Finding, Status
from superadam.cli.doctor.processor import ranges_of
from superadam.host.machine import Host, cpus_of
from superadam.kernels import native
from superadam.kernels.native import Dtype


@pytest.fixture(autouse=True)
def _one_measurement_over_little_memory(monkeypatch):
    monkeypatch.setattr(memory.bandwidth, "__defaults__", (4 << 20,))
    monkeypatch.setattr(memory.measure_bandwidth, "__defaults__", (0.0,))


@pytest.mark.parametrize("is_here", [True, False], ids=["this machine", "one without any file"])
def test_every_probe_says_why_it_is_unknown_and_how_it_could_be_better(tmp_path, is_here):
    findings = diagnose(Host() if is_here else machine(tmp_path))
    assert [*findings] == [*PROBES]
    for finding in findings.values():
        assert is_here or finding.status is not Status.BROKEN, finding
        assert len(finding.detail) > (10 if finding.status is Status.UNKNOWN else 0), finding
        assert "Error" not in finding.detail  # as in FileNotFoundError
        assert bool(finding.remedy) == (finding.status in (Status.BETTER, Status.BROKEN)), finding


HUGE = "/sys/kernel/mm/transparent_hugepage/enabled"
OF_PROC = ["cpuinfo", "meminfo", "self/cgroup", "driver/nvidia/version"]
OF_SYS = ["devices/system/cpu/online", "devices/system/node/node0/cpulist", "fs/cgroup/cpu.max"]
READ_FILES = [*(f"/proc/{name}" for name in OF_PROC), *(f"/sys/{name}" for name in OF_SYS), HUGE]


@pytest.mark.slow
@given(texts=st.lists(st.text(max_size=30), min_size=len(READ_FILES), max_size=len(READ_FILES)))
def test_no_file_content_crashes_a_probe(tmp_path_factory, texts):
    files = dict(zip(READ_FILES, (text.encode(errors="replace").decode() for text in texts), strict=True))
    host = machine(tmp_path_factory.mktemp("machine"), files, programs={"nvidia-smi": texts[0]})
    cheap = {name: probe for name, probe in PROBES.items() if name != "memory bandwidth"}
    assert [*diagnose(host, cheap)] == [*cheap]


TWO_NODES, ONE_OF_MEMORY = (
    {f"/sys/devices/system/node/node{node}/cpulist": cpus for node, cpus in enumerate(lists)}
    for lists in (("0-1", "2-3", ""), ("0-71", ""))
)


@pytest.mark.parametrize(
    ("probe", "files", "options", "remedy"),
    [
        (processor.numa_nodes, TWO_NODES, {}, "numactl --cpunodebind=0 --membind=0 COMMAND"),
        (processor.numa_nodes, TWO_NODES, {"affinity": frozenset({2, 3})}, ""),
        (processor.numa_nodes, ONE_OF_MEMORY, {}, ""),
        (memory.huge_pages, {HUGE: "[always] madvise never"}, {}, ""),
        (memory.huge_pages, {HUGE: "always [madvise] never"}, {}, "export THP_MEM_ALLOC_ENABLE=1"),
        (memory.huge_pages, {HUGE: "always [madvise] never"}, {"environment": {"THP_MEM_ALLOC_ENABLE": "1"}}, ""),
        (memory.huge_pages, {HUGE: "always madvise [never]"}, {"environment": {"THP_MEM_ALLOC_ENABLE": "1"}}, HUGE),
    ],
)
def test_what_could_be_better_on_other_machines(tmp_path, probe, files, options, remedy):
    finding = probe(machine(tmp_path, files, **options))
    assert finding.status is (Status.BETTER if remedy else Status.OK)
    assert remedy in finding.remedy
    assert bool(finding.remedy) is bool(remedy)
    assert files is not ONE_OF_MEMORY or finding.detail == "one, and 1 of memory only"


def test_a_forced_slower_isa_could_be_better(tmp_path, fresh_native):
    *others, slowest = native.available_isas()
    fresh_native.setattr(native, "known_isas", lambda: dict.fromkeys(("best", *others, slowest), "runnable"))
    fresh_native.setenv("SUPERADAM_ISA", slowest)
    finding = processor.instruction_sets(machine(tmp_path, environment={"SUPERADAM_ISA": slowest}))
    assert (finding.status, finding.remedy) == (Status.BETTER, "unset SUPERADAM_ISA")
    assert finding.values["active"] == slowest


def test_kernels_that_were_not_compiled_could_be_better(tmp_path, fresh_native):
    fresh_native.setattr(native, "known_isas", lambda: {"avx512": "not compiled", "scalar": "runnable"})
    finding = processor.instruction_sets(machine(tmp_path))
    assert finding.status is Status.BETTER
    assert "avx512 not compiled" in finding.detail
    assert finding.remedy.startswith("pip install")


VERSION_1 = {"cpu,cpuacct/job/cpu.cfs_quota_us": "250000", "cpu,cpuacct/job/cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("group", "files", "quota"),
    [
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3.0),
        ("4:cpu,cpuacct:/job\n3:memory:/job", VERSION_1, 2.5),
        ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1"}, None),
        (None, {}, None),
    ],
)
def test_cpu_quota(tmp_path, group, files, quota):
    found = {f"/sys/fs/cgroup/{name}": text for name, text in files.items()}
    found |= {} if group is None else {"/proc/self/cgroup": group}
    assert processor.cpu_quota(machine(tmp_path, found)) == quota


@pytest.mark.parametrize(
    ("ours", "torch_s", "variables"),
    [(3, 2, "SUPERADAM_THREADS=2"), (2, 8, "OMP_NUM_THREADS=2"), (3, 8, "SUPERADAM_THREADS=2 OMP_NUM_THREADS=2")],
)
@pytest.mark.parametrize(("quota", "ranks"), [(250_000, {}), (400_000, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})])
def test_more_threads_than_the_quota_of_all_ranks_allows_could_be_better(
    tmp_path, fresh_native, quota, ranks, ours, torch_s, variables
):
    fresh_native.setenv("SUPERADAM_THREADS", str(ours))
    fresh_native.setattr(torch, "get_num_threads", lambda: torch_s)
    files = {"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cpu.max": f"{quota} 100000"}
    finding = processor.threads(machine(tmp_path, files, {**ranks, "SUPERADAM_THREADS": str(ours)}))
    assert (finding.status, finding.remedy) == (Status.BETTER, f"export {variables}")
    assert (finding.values["superadam"], finding.values["quota"]) == (ours, quota / 100_000)


def test_processors_count_cores_and_what_is_allowed(tmp_path):
    files = {
        "/proc/cpuinfo": "processor : 0\nmodel name\t: Some CPU\nprocessor : 1\nmodel name\t: Some CPU\n",
        "/sys/devices/system/cpu/online": "0-7",
    }
    files |= {f"/sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n % 4},{n % 4 + 4}" for n in range(8)}
    finding = processor.processors(machine(tmp_path, files, affinity=frozenset(range(4))))
    assert finding.values == {"name": "Some CPU", "cores": 4, "cpus": 8, "allowed": 4}
    assert finding.detail == "Some CPU: 4 cores, 8 CPUs, of which this process may use 4 (0-3)"


@given(st.frozensets(st.integers(0, 300)))
def test_cpu_lists_are_read_back(numbers):
    assert cpus_of(ranges_of(numbers)) == numbers


@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize("limit", [8 << 20, resource.RLIM_INFINITY])
def test_locked_memory_matters_only_with_a_gpu(tmp_path, monkeypatch, limit, has_gpu):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, resource.RLIM_INFINITY))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    finding = memory.pinned_memory(machine(tmp_path))
    expected = (Status.BETTER, "ulimit -l unlimited") if has_gpu and limit == 8 << 20 else (Status.OK, "")
    assert (finding.status, finding.remedy) == expected


def test_bandwidth_is_what_was_moved_over_the_time_it_took():
    measured = memory.measure_bandwidth(PassArrays(1 << 20, Dtype.FLOAT32, Dtype.BFLOAT16), 1, seconds=0.0)
    assert 1e6 < measured < 1e13  # a byte per microsecond is slower than any machine, ten terabytes a second faster


def test_bandwidth_takes_at_most_a_quarter_of_free_memory(tmp_path):
    host = machine(tmp_path, {"/proc/meminfo": "MemTotal: 99999 kB\nMemAvailable: 16384 kB\n"})
    finding = memory.bandwidth(host, 1 << 30)
    assert finding.status is Status.OK
    assert 0 < finding.values["measured_over"] <= 4 << 20


def test_what_disturbs_the_measurement_is_told_beside_it(tmp_path, monkeypatch):
    stat = "/sys/fs/cgroup/cpu.stat"
    files = {"/proc/self/cgroup": "0::/", stat: "nr_throttled 1\nthrottled_usec 1000000\n", "/proc/loadavg": "0.4 1 1"}
    quiet = memory.bandwidth(machine(tmp_path, files))
    assert (quiet.values["load"], quiet.values["throttled_seconds"]) == (0.4, 0.0)
    assert "measured next to" not in quiet.detail

    def measured(arrays, threads):
        (tmp_path / stat[1:]).write_text("throttled_usec 3500000\n")
        return 1e9

    monkeypatch.setattr(memory, "measure_bandwidth", measured)
    busy = memory.bandwidth(machine(tmp_path, files | {"/proc/loadavg": "3.20 1 1"}))
    disturbed = "a load of 3.2 of the minute before and a quota that stopped its threads for 2.50 s"
    assert busy.detail.endswith(f"; measured next to {disturbed}, so that it may be more")


def test_the_limit_of_the_control_group_is_told(tmp_path):
    files = {"/proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n", "/proc/self/cgroup": "0::/"}
    free = memory.main_memory(machine(tmp_path, files)).detail
    assert free.startswith("8.0 of 16.0 GiB available: training of 587.3 million")
    limit = {"/sys/fs/cgroup/memory.max": str(4 << 30), "/sys/fs/cgroup/memory.current": "0"}
    limited = memory.main_memory(machine(tmp_path, files | limit)).detail
    state = "training of 293.7 million parameters in bf16 on a GPU (404.2 million with moments in bf16)"
    assert limited == f"4.0 of 16.0 GiB available, where the control group allows 4.0: {state}"


C2C = "GPU 0: NVIDIA GH200 480GB (UUID: GPU-0)\n" + "".join(f"\t C2C Link {n}: 44.712 GB/s\n" for n in range(10))


@pytest.mark.parametrize(
    ("row", "programs", "status", "detail"),
    [
        ("0, NVIDIA H200, 00000000:18:00.0, 5, 16, 16", {}, Status.OK, "GPU 0: PCIe 5 x16, 63 GB/s each way"),
        ("0, GPU, 00000000:18:00.0, 4, 8, 16", {}, Status.BETTER, "GPU 0: PCIe 4 x8, 16 GB/s each way, of x16"),
        ("0, GH200, 00000009:01:00.0, 5, 16, 16", {"c2c": C2C}, Status.OK, "GPU 0: NVLink-C2C, 447 GB/s each way"),
        ("0, GPU, 00000000:18:00.0, [N/A], [N/A], [N/A]", {}, Status.OK, "GPU 0 (GPU): not reported"),
        ("", {}, Status.UNKNOWN, "nvidia-smi lists no device"),
    ],
)
def test_links_are_told(tmp_path, row, programs, status, detail):
    finding = accelerator.link(machine(tmp_path, programs={**programs, "--query-gpu": row}))
    assert (finding.status, finding.detail) == (status, detail)


def test_a_driver_with_a_torch_without_cuda_could_be_better(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20  Sun Mar 23\n"
    host = machine(tmp_path, {"/proc/driver/nvidia/version": version})
    assert accelerator.gpus(host).status is Status.BETTER
    assert accelerator.driver(host).detail == "NVIDIA 570.133.20"
    assert accelerator.link(host).status is Status.UNKNOWN


def test_devices_are_counted(tmp_path, monkeypatch):
    class Properties:
        name, total_memory, major, minor = "NVIDIA H200", 141 << 30, 9, 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    finding = accelerator.gpus(machine(tmp_path))
    assert finding.detail == "2 x NVIDIA H200, 141 GiB, capability 9.0"
    monkeypatch.setattr(Properties, "is_integrated", 1, raising=False)
    finding = accelerator.gpus(machine(tmp_path))
    assert finding.status is Status.BETTER
    assert finding.detail.endswith("its memory is the host's, where offloading saves none")


@pytest.mark.parametrize(("version", "status"), [("2.9.1+cpu", Status.BROKEN), ("2.10.0a0+git", Status.OK)])
def test_torch_must_be_new_enough(tmp_path, monkeypatch, version, status):
    monkeypatch.setattr(torch, "__version__", version)
    assert software.torch_version(machine(tmp_path)).status is status


def test_triton_is_missed_only_with_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(software, "version", Mock(side_effect=software.PackageNotFoundError))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert software.triton_version(machine(tmp_path)).status is Status.OK
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert software.triton_version(machine(tmp_path)).remedy == "pip install triton"


FINDINGS = {
    "one": Finding("a detail that is long enough to be wrapped once or twice " * 3, values={"n": 1}),
    "two": Finding("slow", "export FASTER=1"),
    "three [b]": Finding("wrong [/b]", "unset WRONG", fault=Status.BROKEN),
}


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_fits_and_says_everything(width):
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(report.to_table(FINDINGS))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    for word in ("ok", "could be better", "broken", "export FASTER=1", "unset WRONG", "three [b]", "wrong [/b]"):
        assert word in text


WRONG = {"SUPERADAM_ISA": "sse9", "SUPERADAM_THREADS": "0"}
NOISE = """
import ctypes, logging, os, subprocess, sys, warnings
from superadam.cli import main
from superadam.cli.doctor import diagnosis
from superadam.cli.doctor.finding import Finding, Status

stdout, puts = sys.stdout, ctypes.CDLL(None).puts
logging.basicConfig(stream=sys.stdout, level=logging.INFO)
sources = {
    "print": lambda: print("<print>"),
    "held": lambda: stdout.write("<held>"),
    "descriptor": lambda: os.write(1, b"<descriptor>"),
    "C": lambda: puts(b"<C>"),
    "program": lambda: subprocess.run(["echo", "<program>"], check=True),
    "warning": lambda: warnings.warn("<warning>"),
    "logging": lambda: logging.getLogger("superadam").warning("<logging>"),
}

def probe(name):
    def look(host):
        sources[name]()
        if fails:
            raise RuntimeError(name)
        return Finding("noisy", fault=Status.BROKEN)
    return look

diagnosis.diagnose.__defaults__ = ({name: probe(name) for name in sources},)
for fails, status in ((True, 0), (False, 1), (False, 1)):
    assert main.main(["doctor", "--json"]) == status
"""


@pytest.mark.slow
@pytest.mark.subprocess
def test_stdout_is_one_json_document_whatever_is_written_meanwhile():
    """And as before between two reports; what is wrong in the environment keeps no doctor from starting."""
    wrong = os.environ | WRONG
    done = subprocess.run([sys.executable, "-c", NOISE], env=wrong, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second, third = json.loads("[" + done.stdout.replace("}\n{", "},\n{") + "]")
    assert second == third
    names = [finding["name"] for finding in first["findings"]]
    failures = [("unknown", f"RuntimeError: {name}") for name in names]
    assert [(finding["status"], finding["detail"]) for finding in first["findings"]] == failures
    assert len(names) == 7
    for name in names:
        assert done.stderr.count(f"<{name}>") >= 3


def test_shares_of_ranks_are_told(tmp_path):
    environment = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
    shared = processor.ranks(machine(tmp_path, environment=environment))
    assert shared.detail == "rank 0: CPUs 0-2; rank 1: CPUs 3-5; rank 2: CPUs 6-7"
    crowded = processor.ranks(machine(tmp_path, environment=environment, affinity=frozenset({4, 5})))
    assert (crowded.status, crowded.remedy) == (Status.BETTER, "torchrun --nproc-per-node 2")
    assert processor.ranks(machine(tmp_path)).detail == "one, which may use every CPU of this process"
    nonsense = machine(tmp_path, environment={"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "3"})
    assert processor.ranks(nonsense).status is processor.threads(nonsense).status is Status.BROKEN


def test_one_report_of_two_ranks_with_what_is_broken_and_status_1(fresh_native, capsys):
    for name, value in {**WRONG, "LOCAL_WORLD_SIZE": "2"}.items():
        fresh_native.setenv(name, value)
    printed = []
    for rank, status in (("0", 1), ("1", 0)):
        fresh_native.setenv("LOCAL_RANK", rank)
        assert cli.main(["doctor", "--json"]) == status
        printed.append(capsys.readouterr().out)
    assert printed[1] == ""
    told = json.loads(printed[0])
    assert told["broken"] is True
    findings = {finding["name"]: finding for finding in told["findings"]}
    broken = {name: finding for name, finding in findings.items() if finding["status"] == "broken"}
    remedies = {name: finding["remedy"] for name, finding in broken.items()}
    assert remedies == {"instruction sets": "unset SUPERADAM_ISA", "threads": "unset SUPERADAM_THREADS"}
    for name, words in (("instruction sets", ("sse9", native.available_isas()[0])), ("threads", ("'0'",))):
        assert all(word in broken[name]["detail"] for word in words)
    assert findings["memory bandwidth"]["status"] == "ok"
    assert len(findings["ranks"]["values"]["shares"]) == 2
