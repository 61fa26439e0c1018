"""`python -m tests.faults [NAME...]`: a JSON line a scenario. --write FILE makes the document."""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch

from .corpus import scenarios
from .launch import run


def main():
    torch.set_num_threads(1)
    words = sys.argv[1:]
    target = words[words.index("--write") + 1] if "--write" in words else None
    names = [word for word in words if word != "--write" and word != target]
    chosen = [one for one in scenarios() if not names or any(one.name.startswith(name) for name in names)]
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        for index, scenario in enumerate(chosen):
            began = time.time()
            out = run(scenario, Path(folder) / str(index))
            outcomes.append(out)
            line = {
                "name": scenario.name, "verdict": out.verdict, "culprits": out.culprits, "bad": scenario.bad,
                "right_kind": out.right_kind, "right_culprit": out.right_culprit, "seconds": out.seconds,
                "injected": out.injected, "lost": out.lost, "text": out.text, "took_s": time.time() - began,
            }  # fmt: skip
            print(json.dumps(line), flush=True)
    if target is not None:
        from .document import write

        write(Path(target), outcomes)


if __name__ == "__main__":
    main()
