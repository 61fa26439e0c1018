"""`python -m tests.faults [NAME...]`: a JSON line a scenario. --write FILE makes the document, --lanes N runs N at a
time, --tools prints what torch's own tools say instead.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from . import tools
from .corpus import scenarios
from .document import write
from .launch import run

TIMED = ("slow", "uniform")  # these measure, so nothing runs beside them


def main():
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--tools", action="store_true")
    args = parser.parse_args()
    began = time.time()
    chosen = [k for k, one in enumerate(scenarios()) if not args.names or one.name.startswith(tuple(args.names))]
    outcomes = said = None
    if not args.tools:
        alone = [k for k in chosen if scenarios()[k].fault in TIMED]
        outcomes = _all(_one, [k for k in chosen if k not in alone], args.lanes) + _all(_one, alone, 1)
    if args.tools or args.write:
        said = _all(_tools, [k for k in chosen if tools.fits(scenarios()[k])], 2 * args.lanes)  # they mostly wait
    if args.write:
        write(args.write, outcomes, said, time.time() - began)


def _all(function, chosen, lanes):
    """[(scenario, result)], of processes that have this one's imports. Each is printed as it comes."""
    every, out = scenarios(), []
    if not chosen:
        return out
    with ProcessPoolExecutor(lanes, multiprocessing.get_context("fork")) as pool:
        for index, (took, result) in zip(chosen, pool.map(function, chosen), strict=True):
            out.append((every[index], result))
            print(json.dumps({"name": every[index].name, "took_s": round(took, 2), **_line(*out[-1])}), flush=True)
    return out


def _line(scenario, result):
    if isinstance(result, list):
        return {"bad": scenario.bad, **{name: str(said) for name, said in zip(tools.NAMES, result, strict=True)}}
    right = {"right_kind": result.right_kind(scenario), "right_culprit": result.right_culprit(scenario)}
    return {"bad": scenario.bad, **right, **vars(result)}


def _timed(function, index):
    began = time.time()
    with tempfile.TemporaryDirectory() as folder:
        result = function(scenarios()[index], Path(folder))
    return time.time() - began, result


def _one(index):
    return _timed(run, index)


def _tools(index):
    return _timed(tools.ask, index)


if __name__ == "__main__":
    main()
