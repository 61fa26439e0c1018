"""benchmarks/publish.py: the page it makes of results, and which targets it calls met."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def publish():
    spec = importlib.util.spec_from_file_location("publish", ROOT / "benchmarks" / "publish.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(publish, folder, slow=1.0):
    """Results in which shm takes 40 us and, from 1 MB on, a quarter of Gloo's time; `slow`: times that for one cell."""
    for world_size in publish.TRIALS:
        for op in publish.OPS:
            rows, ratios, copies = [], [], []
            for size in map(publish.parse_size, publish.SIZES):
                shm = 40.0 if size <= 4096 else size / 4000
                shm *= slow if (op, world_size, size) == ("all_gather", 2, 4096) else 1
                for via in ("group", "torch"):
                    base = {"op": op, "via": via, "algorithm": "", "world_size": world_size, "bytes": size}
                    rows.append({**base, "backend": "shm", "time_us_median": shm, "correct": True})
                    rows.append({**base, "backend": "gloo", "time_us_median": 4 * shm, "correct": True})
                    ratios.append({**base, "backend": "shm", "versus": "gloo", "speed_ratio": 4.0})
                    if op == "all_reduce" and size >= 10**6:
                        ratios.append({**base, "backend": "shm", "versus": "copy limit", "speed_ratio": 0.5})
                if op == "all_reduce" and size >= 10**6:
                    copies.append({"op": op, "world_size": world_size, "bytes": size, "time_us_median": shm / 2})
            body = {"world_size": world_size, "rows": rows, "ratios": {"rows": ratios}, "copy_limit": {"rows": copies}}
            (folder / f"{op}-{world_size}.json").write_text(json.dumps(body))
    for number, factor in enumerate((1, 2, 3)):
        sizes = [publish.parse_size(size) for size in publish.MPICH_SIZES]
        shm = [{"via": "group", "bytes": size, "time_us_median": 100.0} for size in sizes]
        mpich = {str(size): 100.0 * factor for size in sizes}
        (folder / f"mpich-{number}.json").write_text(json.dumps({"shm": shm, "mpich": mpich}))


def lines_of(page, start):
    return [line for line in page.splitlines() if line.startswith(start)]


def test_the_page(publish, tmp_path):
    write(publish, tmp_path, slow=3.1)
    page = publish.page(publish.Results(tmp_path))
    assert "$" not in page
    assert lines_of(page, "| up to 4 KiB, 2 ranks, `Group`") == [
        "| up to 4 KiB, 2 ranks, `Group` | at most 60 us | 124 us | **missed**: all_gather 4 KiB 124 us |"
    ]
    assert lines_of(page, "| all_reduce, all_gather, reduce_scatter, 1 to 100 MB, 2 ranks, `Group`") == [
        "| all_reduce, all_gather, reduce_scatter, 1 to 100 MB, 2 ranks, `Group` | 3x Gloo | 4.00x | met |"
    ]
    assert "| all_reduce 100 MB, 2 ranks | 70% of the copy limit | 50.0% | **missed** |" in page
    assert "| all_reduce 100 MB, 2 ranks | 1.5x MPICH | 2.00x | met |" in page
    assert (
        lines_of(page, "| 100 MB |")[0] == "| 100 MB | 100,000 | 25,000 | 4.00 | 4.0 | 100,000 | 25,000 | 4.00 | 4.0 |"
    )
    assert len(lines_of(page, "**all_to_all**")) == 2
    assert "| 8 B | 200 | 100 | 2.00 |" in page


def test_what_was_measured_is_kept(publish, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(publish, "bench", lambda *flags: made.append(flags) or {"rows": []})
    with pytest.raises(SystemExit, match="start it again"):
        publish.measure(tmp_path, None, seconds=-1)
    assert not made
    (tmp_path / "all_reduce-2.json").write_text("{}")
    publish.measure(tmp_path, None, seconds=60)
    assert len(made) == len(publish.OPS) * len(publish.TRIALS) - 1
    assert (tmp_path / "all_reduce-2.json").read_text() == "{}"
