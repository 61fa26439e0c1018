"""torch and its companions, the back ends, and what would be used by default."""

from __future__ import annotations

import importlib.metadata
import platform
import sys

from crosscut.doctor.finding import Finding, ok, problem, warn

OLDEST_TORCH = (2, 8)
OLDEST_PYTHON = (3, 10)
COMPANIONS = ("numpy", "rich", "safetensors", "psutil")


def python(version: tuple[int, ...]) -> Finding:
    """The interpreter."""
    text = ".".join(map(str, version[:3]))
    if version[:2] < OLDEST_PYTHON:
        return problem("Python", text, "crosscut needs Python 3.10 or newer")
    return ok("Python", f"{text} on {platform.system()} {platform.machine()}")


def torch_version(version: str | None, why: str = "") -> Finding:
    """version: None if torch cannot be imported, `why` the error."""
    if version is None:
        return problem("torch", f"cannot be imported: {why}", "pip install 'torch>=2.8'")
    numbers = [part for part in version.split("+")[0].split(".")[:2] if part.isdigit()]
    if tuple(map(int, numbers)) < OLDEST_TORCH:
        return problem("torch", version, "crosscut needs torch 2.8 or newer: pip install -U 'torch>=2.8'")
    return ok("torch", version)


def companions(versions: dict[str, str | None]) -> Finding:
    """name -> version, None where it is missing."""
    missing = [name for name, version in versions.items() if version is None]
    text = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    if missing:
        return problem("packages", text, f"pip install {' '.join(missing)}")
    return ok("packages", text)


def backends(*, gloo: bool, shm_why_not: str | None, nccl_built: bool, num_gpus: int) -> list[Finding]:
    """A finding a back end."""
    found = [ok("threads", "runs everywhere: all ranks in one process")]
    if gloo:
        found.append(ok("gloo", "built into torch"))
    else:
        found.append(problem("gloo", "not in this build of torch", "install torch from pytorch.org: it has Gloo"))
    if shm_why_not is None:
        found.append(ok("shm", "runs here: ranks of one host through shared memory"))
    else:
        found.append(warn("shm", f"cannot run here: {shm_why_not}", "gloo is used instead"))
    if num_gpus and not nccl_built:
        found.append(warn("nccl", f"{num_gpus} GPUs, but this torch has no NCCL", "install torch's Linux CUDA build"))
    else:
        found.append(ok("nccl", f"for {num_gpus} GPU(s)" if num_gpus else "needs GPUs: not used here"))
    return found


def default(num_gpus: int) -> Finding:
    """What `crosscut train` would use for 2 ranks (with GPUs: for all of them), and why."""
    from crosscut.comm.choose import choose_backend, choose_threads

    ranks = num_gpus if num_gpus > 1 else 2
    try:
        choice = choose_backend(None, "cpu" if num_gpus == 1 else None, ranks)
    except ValueError as error:
        return problem("default", str(error), "say --backend gloo")
    threads, threads_why = choose_threads(ranks)
    also = " (one GPU: a world of one rank uses it)" if num_gpus == 1 else ""
    return ok(
        "default",
        f"{ranks} ranks use {choice.backend} on {choice.device}: {choice.why}; {threads} thread(s) a rank: "
        f"{threads_why}{also}",
    )


def examine() -> list[Finding]:
    """This machine. Without torch the back ends cannot be asked."""
    found = [python(tuple(sys.version_info[:3])), companions({name: _version(name) for name in COMPANIONS})]
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:  # a broken installation raises whatever it likes
        return [*found, torch_version(None, " ".join(str(error).split())[:200])]
    found.append(torch_version(torch.__version__))
    if not dist.is_available():
        fix = "install torch from pytorch.org: its builds have it"
        return [*found, problem("back ends", "this torch is built without torch.distributed", fix)]
    from crosscut.comm.shm import platform as shm_platform

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found += backends(
        gloo=dist.is_gloo_available(),
        shm_why_not=shm_platform.why_not(),
        nccl_built=dist.is_nccl_available(),
        num_gpus=num_gpus,
    )
    return [*found, default(num_gpus)]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
