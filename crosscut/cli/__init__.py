"""The command line. `main.py` finds the subcommand; each subcommand is one module, imported only when it is called."""
