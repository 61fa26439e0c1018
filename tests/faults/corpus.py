"""The corpus: faults at a named rank and step, in stock programs and in crosscut runs, and clean runs beside them."""

from . import programs
from .engine import Run
from .inject import EVERY
from .launch import Scenario

CRASH = {
    "raise": ("exception",),
    "nan": ("exception",),
    "exit": ("dead_rank",),
    "kill": ("dead_rank",),
    "segv": ("dead_rank",),
    "return": ("dead_rank", "missing_call"),
    "oom": ("oom",),
    "disk": ("disk_full",),
}
STUCK = {"stop": ("stuck_outside",), "sleep": ("stuck_outside",), "loop": ("stuck_outside",), "gil": ("stuck_outside",)}
LEFT = ("missing_call", "order")
PROCESS = {**CRASH, **STUCK, "batches": (*LEFT, "mismatch", "stuck_outside")}

# name -> (program, ranks, back end)
STOCK = {
    "ddp": (programs.ddp, 2, "gloo"),
    "fsdp": (programs.fsdp, 2, "gloo"),
    "hand": (programs.hand, 3, "gloo"),
    "messages": (programs.messages, 3, "gloo"),
    "groups": (programs.groups, 4, "gloo"),
    "tensor": (programs.tensor, 2, "gloo"),
    "pipeline": (programs.pipeline, 3, "gloo"),
    "ring": (programs.ring, 3, "gloo"),
    "many": (programs.many, 4, "gloo"),
    "timed": (programs.timed, 3, "gloo"),
    "links": (programs.links, 4, "gloo"),
    "shm ddp": (programs.ddp, 2, "shm"),
    "shm hand": (programs.hand, 3, "shm"),
}
CROSSCUT = {
    "crosscut dp": (Run("dp=2", "gloo"), 2, ""),
    "crosscut dp zero": (Run("dp=2", "shm", zero=1), 2, ""),
    "crosscut tp": (Run("tp=2"), 2, ""),
    "crosscut pp": (Run("pp=2"), 2, ""),
    "crosscut dp tp": (Run("dp=2,tp=2"), 4, ""),
    "crosscut pp dp": (Run("pp=2,dp=2", "gloo"), 4, ""),
    "crosscut calls": (Run("dp=3", calls=True), 3, ""),
    "crosscut chain": (Run("pp=4"), 4, ""),
}
PROGRAMS = {**STOCK, **CROSSCUT}
WHOLE = ("ddp", "fsdp", "hand")  # these meet every fault of a process; of the others each meets some
SOME = {
    "messages": ("batches", "raise", "nan", "exit"),
    "groups": ("kill", "segv", "return", "oom"),
    "tensor": ("kill", "gil", "batches"),
    "pipeline": ("raise", "stop", "batches"),
    "shm ddp": ("kill", "sleep", "batches"),
    "shm hand": ("gil", "return"),
    "crosscut dp": ("disk", "stop", "sleep", "loop"),
    "crosscut dp zero": ("gil", "batches", "raise", "nan"),
    "crosscut tp": ("exit", "kill", "segv", "return"),
    "crosscut pp": ("oom", "disk", "stop", "sleep"),
    "crosscut dp tp": ("loop", "gil", "batches", "raise"),
    "crosscut pp dp": ("nan", "exit", "kill", "segv"),
}

# (program, fault, bad rank, verdicts that are right): mistakes of communication.
STAGES = (*LEFT, "waiting_cycle", "mismatch")
MISTAKES = [
    ("ddp", "skip", 1, LEFT),
    ("ddp", "op", 1, ("mismatch",)),
    ("ddp", "unused", 1, ("exception", "missing_call", "order", "stuck_outside", "mismatch")),
    ("ddp", "empty", 1, (*LEFT, "desync")),
    ("ddp", "no step", 0, ("desync",)),
    ("fsdp", "branch", 1, ("missing_call", "order", "stuck_outside", "exception", "mismatch")),
    ("hand", "skip", 2, LEFT),
    ("hand", "extra", 1, ("order",)),
    ("hand", "swap", 1, ("order",)),
    ("hand", "shape", 1, ("mismatch",)),
    ("hand", "view", 2, ("mismatch",)),
    ("hand", "dtype", 1, ("mismatch",)),
    ("hand", "op", 2, ("mismatch",)),
    ("hand", "root", 1, ("mismatch",)),
    ("hand", "splits", 1, ("mismatch",)),
    ("hand", "branch", 1, ("mismatch", "order")),
    ("hand", "seed", 2, LEFT),  # a call that is made now and then: one too many here, or left out there
    ("hand", "draw", 0, LEFT),
    ("hand", "no step", 2, ("desync",)),
    ("messages", "length", 1, ("mismatch",)),
    ("messages", "type", 2, ("mismatch",)),
    ("messages", "norecv", 1, (*STAGES, "stuck_outside")),
    ("messages", "nosend", 0, (*STAGES, "stuck_outside")),
    ("messages", "early", 1, STAGES),
    ("groups", "skip", 1, STAGES),
    ("groups", "norm first", 3, STAGES),
    ("groups", "group", 1, STAGES),
    ("groups", "source", 3, ("exception",)),
    ("tensor", "branch", 1, STAGES),
    ("tensor", "shape", 1, ("mismatch",)),
    ("pipeline", "micro", 1, STAGES),
    ("ring", "blocking", EVERY, ("waiting_cycle",)),
    ("shm ddp", "skip", 1, LEFT),
    ("shm ddp", "op", 1, ("mismatch",)),
    ("shm hand", "swap", 1, ("order",)),
    ("shm hand", "shape", 2, ("mismatch",)),
    ("shm hand", "draw", 1, LEFT),
    ("crosscut dp", "skip", 1, LEFT),
    ("crosscut dp", "extra", 1, ("order", "mismatch")),
    ("crosscut dp", "no step", 1, ("desync",)),
    ("crosscut tp", "skip", 1, LEFT),
    ("crosscut pp", "skip", 1, STAGES),
    ("crosscut dp tp", "skip", 3, STAGES),
    ("crosscut dp tp", "extra", 2, STAGES),
    ("crosscut dp tp", "seed", 2, STAGES),
    ("crosscut pp dp", "skip", 2, STAGES),
    ("crosscut calls", "root", 1, ("mismatch",)),
    ("crosscut calls", "shape", 2, ("mismatch",)),
    ("crosscut calls", "view", 1, ("mismatch",)),
    ("crosscut calls", "dtype", 0, ("mismatch",)),
    ("crosscut calls", "op", 1, ("mismatch",)),
    ("crosscut calls", "swap", 2, ("order",)),
    ("crosscut calls", "splits", 1, ("mismatch",)),
    ("crosscut calls", "branch", 2, ("mismatch", "order")),
    ("crosscut calls", "draw", 1, LEFT),
]
OTHER = [
    ("hand", "port", 0, ("exception",)),
    ("crosscut dp", "port", 0, ("exception",)),
    ("timed", "slow", 2, ("straggler",)),
    ("links", "slow", 1, ("straggler",)),
    ("crosscut calls", "slow", 1, ("straggler",)),
    ("crosscut chain", "slow", 1, ("straggler",)),
]
HARMLESS = [("timed", "uniform"), ("links", "uniform"), ("hand", "section"), ("crosscut calls", "uniform")]

WHAT = {
    "raise": "raises KeyError",
    "nan": "finds that its loss is NaN, and raises",
    "exit": "sys.exit(5)",
    "kill": "is killed by SIGKILL",
    "segv": "crashes by SIGSEGV",
    "return": "os._exit(0) in the middle of the run",
    "oom": "allocates more than there is",
    "disk": "writes to a full disk",
    "stop": "is stopped by SIGSTOP",
    "sleep": "sleeps for ten minutes",
    "loop": "loops in Python",
    "gil": "loops in C and holds the GIL",
    "batches": "has fewer batches than the others",
    "empty": "finds nothing to learn from in one batch and goes on to the next",
    "skip": "leaves a collective out (in crosscut runs: clipping)",
    "extra": "makes a collective too many",
    "swap": "makes two collectives of the same shape in the other order",
    "shape": "another number of elements",
    "view": "another shape with as many elements",
    "dtype": "another dtype",
    "op": "MAX instead of SUM",
    "root": "another root",
    "splits": "splits that the others do not expect",
    "branch": "goes another way: another collective, another part of the model, an evaluation",
    "unused": "leaves a part of the model without gradient",
    "seed": "seeds its random numbers anew, and they decide about a collective",
    "draw": "draws a random number more than the others, and they decide about a collective",
    "no step": "skips an optimizer step: every call still matches",
    "length": "receives more than was sent",
    "type": "receives as another dtype than was sent",
    "norecv": "leaves a receive out",
    "nosend": "leaves a send out",
    "early": "makes its all_reduce before its messages",
    "norm first": "makes calls over two groups in the other order",
    "group": "makes a call over the wrong group",
    "source": "takes a rank within a group for a rank of the world",
    "micro": "cuts its batch into fewer micro-batches than the other stages",
    "blocking": "every rank of a ring sends, and then receives",
    "port": "another program listens on the master port",
    "slow": "computes 25% slower, or (links, chain) sends over a link that takes half as long again",
    "uniform": "all ranks, or all links, are slow alike",
    "section": "works in `crosscut.watch.section` for twice the hang time-out",
}


def scenarios():
    """All of them, the clean ones last."""
    out = []
    for index, name in enumerate(PROGRAMS):
        faults = PROCESS if name in WHOLE else SOME.get(name, ())
        out += [(name, fault, (index + len(fault)) % PROGRAMS[name][1], PROCESS[fault]) for fault in faults]
    out += [*MISTAKES, *OTHER, *((name, fault, 0, ("none",)) for name, fault in HARMLESS)]
    out += [(name, "", 0, ("none",)) for name in PROGRAMS if name not in ("timed", "links")]
    return [_scenario(*one) for one in out]


def _scenario(name, fault, bad, kinds):
    run, ranks, backend = PROGRAMS[name]
    return Scenario(f"{name}: {fault or 'clean'}", run, ranks, fault, bad, kinds=kinds, backend=backend)
