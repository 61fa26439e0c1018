"""The `shm` back end: ranks of one Linux host talk through shared memory, in pure Python and torch operations.

    crosscut.register_shm()
    torch.distributed.init_process_group("shm")     # any program; then meshes, DDP, FSDP2, DTensor, ... as with Gloo

From the bottom up, each file one idea:

    platform.py       can this machine run it, and if not, why
    futex.py          sleep until a word in shared memory changes
    layout.py         where each control word and each data slot lies in a rank's segment
    segment.py        anonymous shared memory, opened by its peers through /proc/PID/fd
    peers.py          processes met: their doorbells, and whether they live
    rendezvous.py     a group's ranks find and map each other's segments
    station.py        one per process: progress of all groups, spinning, sleeping, time-outs
    slots.py          the steps all ranks of a group count together, and their memory
    channel.py        one per group: the queue of its calls
    failing.py        who is missing, who has ended, who is to blame
    reduce.py         what the reductions compute, in which order and precision
    staged.py         the skeleton of the collectives: fill a slot, post it, read the peers'
    reducing.py       all_reduce, reduce_scatter, reduce
    moving.py         all_gather, broadcast, gather, scatter, all_to_all
    mail.py           send and receive: tags, any order, any source
    calls*.py         what torch.distributed calls, in terms of these; work.py: what it gets back
    process_group.py  all of it as a `torch.distributed.ProcessGroup`
    register.py       `register_shm`

docs/shm.md explains the protocol.
"""
