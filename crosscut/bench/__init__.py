"""`crosscut bench`: how fast collectives are here, measured as nccl-tests does, every back end in the same processes.

sizes.py        8, 4KiB, 100MB
definitions.py  what S, algbw and busbw are
plan.py         what to measure, checked before anything starts
data.py         what ranks put in, and what must come out
calls.py        one call of an operation: through `Group`, through torch.distributed, by a named algorithm
sides.py        gloo, shm and nccl side by side in one world of processes
trials.py       trials of several variants in turn; medians; ratios of paired trials
ranks.py        what a rank does
measure.py      start the ranks, follow them, keep what they have measured
matrix.py       latency and bandwidth from rank to rank
machine.py      the machine's profile: copying, matrix products, a latency and a bandwidth per operation
show.py, plot.py  tables, CSV, a page with curves
"""
