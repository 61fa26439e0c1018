"""One fault at a named rank and step: those of a process happen here, those of communication the program makes."""

import ctypes
import os
import random
import re
import signal
import time

import torch

EVERY = -1  # a mistake that all ranks make
PROCESS = ("raise", "exit", "kill", "stop", "segv", "sleep", "loop", "gil", "oom", "disk", "nan", "return")
RANDOM = ("seed", "draw")  # the ranks' random numbers come apart
STEPLESS = ("", "slow", "uniform", "port")


class Inject:
    """`inject(step)` is called by the program once a step; it returns the name of a fault of communication, or ""."""

    def __init__(self, fault, rank, bad_rank, step):
        self.fault, self.rank, self.bad_rank, self.step = fault, rank, bad_rank, step

    def __call__(self, step):
        """The fault, if this is its rank and step."""
        if self.fault in STEPLESS or self.bad_rank not in (self.rank, EVERY) or step != self.step:
            return ""
        self.happens()
        if self.fault in PROCESS:
            getattr(self, f"_{self.fault}")()
            raise AssertionError(f"{self.fault} did nothing")
        if self.fault == "seed":
            random.seed(4)
        elif self.fault == "draw":
            random.random()
        return self.fault

    def happens(self):
        """Called when the fault happens."""

    def has(self, *names):
        """Whether the fault, on whichever rank and step, is one of these."""
        return self.fault in names

    def slow(self):
        """How many times longer this rank computes."""
        return 1.25 if self.fault == "uniform" or (self.fault == "slow" and self.rank == self.bad_rank) else 1.0

    def _raise(self):
        raise KeyError("no such shard")

    def _exit(self):
        raise SystemExit(5)

    def _return(self):
        os._exit(0)

    def _kill(self):
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def _stop(self):
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)

    def _segv(self):
        ctypes.string_at(0)

    def _sleep(self):
        time.sleep(600)

    def _loop(self):
        while True:
            pass

    def _gil(self):
        re.match("(a*)*b", "a" * 60)  # in C, and the GIL is never given back

    def _oom(self):
        torch.empty(1 << 60, dtype=torch.uint8)

    def _disk(self):
        with open("/dev/full", "w") as file:
            file.write("a checkpoint")

    def _nan(self):
        if not torch.isfinite(torch.log(torch.tensor(-1.0))):
            raise FloatingPointError("loss is nan")
