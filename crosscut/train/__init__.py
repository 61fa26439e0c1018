"""Training on text: config, data, optimizer, checkpoints, the loop. `config` and `corpus` import no torch."""
