"""The corpus: faults at a named rank and step, in stock programs and in crosscut runs, and clean runs beside them."""

from . import programs
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

STOCK = {
    "ddp": (programs.ddp, 2),
    "fsdp": (programs.fsdp, 2),
    "hand": (programs.hand, 3),
    "messages": (programs.messages, 3),
    "groups": (programs.groups, 4),
}
CROSSCUT = {
    "crosscut dp": (programs.crosscut_run("dp=2", "gloo"), 2),
    "crosscut dp zero": (programs.crosscut_run("dp=2", "shm", 1), 2),
    "crosscut tp": (programs.crosscut_run("tp=2"), 2),
    "crosscut pp": (programs.crosscut_run("pp=2"), 2),
    "crosscut dp tp": (programs.crosscut_run("dp=2,tp=2"), 4),
    "crosscut pp dp": (programs.crosscut_run("pp=2,dp=2", "gloo"), 4),
}

# (program, fault, bad rank, verdicts that are right): mistakes of communication.
MISTAKES = [
    ("ddp", "skip", 1, LEFT),
    ("ddp", "op", 1, ("mismatch",)),
    ("ddp", "unused", 1, ("exception", "missing_call", "order", "stuck_outside", "mismatch")),
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
    ("hand", "seed", 2, ("order",)),
    ("messages", "length", 1, ("mismatch",)),
    ("messages", "type", 2, ("mismatch",)),
    ("messages", "norecv", 1, ("missing_call", "order", "waiting_cycle", "mismatch", "stuck_outside")),
    ("messages", "nosend", 0, ("missing_call", "order", "waiting_cycle", "mismatch", "stuck_outside")),
    ("messages", "early", 1, ("order", "missing_call", "waiting_cycle")),
    ("groups", "skip", 1, (*LEFT, "waiting_cycle")),
    ("groups", "norm first", 3, ("order", "missing_call", "waiting_cycle")),
    ("groups", "group", 1, ("mismatch", "order", "missing_call", "waiting_cycle")),
    ("crosscut dp", "skip", 1, LEFT),
    ("crosscut dp", "extra", 1, ("order", "mismatch")),
    ("crosscut tp", "skip", 1, LEFT),
    ("crosscut pp", "skip", 1, (*LEFT, "waiting_cycle")),
    ("crosscut dp tp", "skip", 3, (*LEFT, "waiting_cycle")),
    ("crosscut dp tp", "extra", 2, ("order", "mismatch", "waiting_cycle")),
    ("crosscut pp dp", "skip", 2, (*LEFT, "waiting_cycle")),
]


def scenarios():
    """All of them, the clean ones last."""
    known = {**STOCK, **CROSSCUT}
    out = []
    every = list(PROCESS)
    for index, (name, (run, ranks)) in enumerate(known.items()):
        # Every fault in two of the stock programs; of the others four each, so that every fault meets several.
        faults = every if name in ("ddp", "hand") else [every[(4 * index + k) % len(every)] for k in range(4)]
        for fault in faults:
            bad = (index + len(fault)) % ranks
            out.append(Scenario(f"{name}: {fault}", run, ranks, fault, bad, kinds=PROCESS[fault]))
    for name, fault, bad, kinds in MISTAKES:
        run, ranks = known[name]
        out.append(Scenario(f"{name}: {fault}", run, ranks, fault, bad, kinds=kinds))
    out.append(Scenario("hand: port taken", programs.hand, 2, "port", 0, kinds=("exception",)))
    out.append(Scenario("timed: slow rank", programs.timed, 3, "slow", 2, kinds=("straggler",)))
    out.append(Scenario("links: slow link", programs.links, 4, "slow", 1, kinds=("straggler",)))
    out += [Scenario(f"{name}: clean", run, ranks) for name, (run, ranks) in known.items()]
    out.append(Scenario("timed: uniformly slow", programs.timed, 3, "uniform", 0))
    return [*out, Scenario("links: uniformly slow", programs.links, 4, "uniform", 0)]
