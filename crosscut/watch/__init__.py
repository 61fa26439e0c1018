"""Never silent, never hung: the recorder of every rank, the watchdog over all, and the autopsy in words. No torch."""
