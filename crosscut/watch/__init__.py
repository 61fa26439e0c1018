"""Never silent, never hung: the recorder of every rank, the watchdog over all, and the autopsy in words.

    import crosscut.watch

    crosscut.watch.install()                     # before torch.distributed.init_process_group
    with crosscut.watch.section("evaluation", limit_s=600):
        ...

or, without touching the program, `torchrun ... -m crosscut.watch train.py`. Importing this package imports no torch.
"""

from crosscut.watch.program import install, section

__all__ = ["install", "section"]
