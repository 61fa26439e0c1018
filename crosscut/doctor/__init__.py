"""`crosscut doctor`: can training work on this machine, and what would be used? Each finding is a line with its fix.

finding.py    ok, warn, problem
software.py   torch, its companions, the back ends, what would be used by default
hardware.py   cores, NUMA, memory, GPUs and the links between them
topology.py   what `nvidia-smi topo -m` says
system.py     limits, shared memory, ptrace, a free port, the host's name, the launcher's variables
examine.py    all of them, and the block for a bug report
"""
