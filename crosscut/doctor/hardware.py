"""Cores, NUMA nodes, memory, GPUs and their links."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from crosscut.doctor import topology
from crosscut.doctor.finding import Finding, ok, problem, warn

_GB = 10**9


def cores(usable: int, present: int, numa_nodes: int) -> Finding:
    """usable: what this process may run on."""
    text = f"{usable} usable" + (f" of {present}" if present != usable else "")
    text += f", {numa_nodes} NUMA node{'s' if numa_nodes != 1 else ''}" if numa_nodes else ""
    if usable < 2:
        return warn("cores", text, "ranks will take turns on one core; give this process 2 cores or more")
    if numa_nodes > 1:
        return warn(
            "cores", text, "keep the ranks that talk most on one node: numactl --cpunodebind=0 --membind=0 crosscut ..."
        )
    return ok("cores", text)


def memory(available: int, total: int) -> Finding:
    """In bytes."""
    text = f"{available / _GB:.1f} GB free of {total / _GB:.1f}"
    if available < _GB:
        return problem("memory", text, "each rank with torch takes about 0.35 GB; free some memory")
    if available < 4 * _GB:
        return warn("memory", text, "use a small model and at most 2 ranks, or free some memory")
    return ok("memory", text)


def gpus(names: list[str], has_driver: bool) -> Finding:
    """names: what torch sees; has_driver: whether nvidia-smi is there and lists GPUs."""
    if names:
        kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        return ok("GPUs", kinds)
    if has_driver:
        return warn(
            "GPUs",
            "nvidia-smi sees GPUs, torch does not",
            "install torch's CUDA build (pytorch.org/get-started), or look at CUDA_VISIBLE_DEVICES",
        )
    return ok("GPUs", "none: ranks run on the CPU")


def links(output: str | None, num_gpus: int) -> Finding:
    """output: what `nvidia-smi topo -m` printed; None: there is no nvidia-smi, or it failed."""
    if output is None:
        if num_gpus == 0:
            return ok("GPU links", "no GPUs")
        return warn("GPU links", "unknown: nvidia-smi topo -m did not answer", "install nvidia-smi to see them")
    try:
        found = topology.parse(output)
    except ValueError as error:
        if num_gpus == 0:
            return ok("GPU links", "no GPUs")
        return warn("GPU links", str(error), "run nvidia-smi topo -m yourself and report what it prints")
    text = found.text()
    if found.slowest == "SYS":
        if any(kind.startswith("NV") for kind in found.links.values()):
            return warn(
                "GPU links", text, "not every pair has NVLink: give tp the GPUs that do (CUDA_VISIBLE_DEVICES order)"
            )
        return warn("GPU links", text, "keep tp within a NUMA node (the pairs that are not SYS); put dp or pp across")
    return ok("GPU links", text)


def examine() -> list[Finding]:
    """This machine."""
    found = [cores(_usable_cores(), os.cpu_count() or 1, len(numa_nodes()))]
    if importlib.util.find_spec("psutil") is not None:  # where it is missing, that is found under `packages`
        import psutil

        state = psutil.virtual_memory()
        found.append(memory(state.available, state.total))
    names = gpu_names()
    output = topo_output()
    found.append(gpus(names, output is not None and "GPU0" in output))
    found.append(links(output, len(names)))
    return found


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def numa_nodes() -> list[str]:
    """`node0`, ...: Linux only."""
    folder = Path("/sys/devices/system/node")
    return sorted(path.name for path in folder.glob("node*") if re.fullmatch(r"node\d+", path.name))


def gpu_names() -> list[str]:
    """What torch sees."""
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def topo_output() -> str | None:
    """What `nvidia-smi topo -m` prints; None if there is none or it fails."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
