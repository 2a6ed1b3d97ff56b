"""What tools/compare_parallel.py runs and writes, without the measuring."""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import compare_parallel  # noqa: E402
import compare_parallel_rows as parallel_rows  # noqa: E402
import scale  # noqa: E402

TIMES = {"forward": 2.0, "forward_backward": 8.0}


def fa_row(scheme="ring", tokens=65536, **others):
    return {"kind": "row", "tokens": tokens, "h_q": 16, "h_kv": 16, "d": 128, "causal": True, "packed": False,
            "layout": "zigzag", "ranks": 4, "scheme": scheme, "reserved_multiprocessors": 16, **others}


def peer_row(peer="cudnn", tokens=65536, **others):
    return {"kind": "row", "peer": peer, "ranks": 4, "tokens": tokens, "h_q": 16, "h_kv": 16, "d": 128, "causal": True, **others}


def test_heads_and_names_are_checked():
    assert parallel_rows.head_pairs("16/16,32/8") == [(16, 16), (32, 8)]
    for wrong in ("16", "16/3", "8/16", "16/0", "a/b", ""):
        with pytest.raises(argparse.ArgumentTypeError):
            parallel_rows.head_pairs(wrong)
    assert parallel_rows.names_among(("cudnn", "flash"))("") == []
    with pytest.raises(argparse.ArgumentTypeError, match="accepted are cudnn, flash"):
        parallel_rows.names_among(("cudnn", "flash"))("cudnn,math")


def test_options_reach_both_programs(tmp_path):
    args = compare_parallel.parse(["--ranks", "4", "--tokens", "1048576", "--heads", "16/16", "--schemes", "ring,ring:2", "--least",
                                   "1", "--limit", "70", "--peer-limit", "40", "--no-single", "--rotate", "alltoall"])
    fa = compare_parallel.fa_command(args, 4, tmp_path / "fa")
    for pair in (("--tokens", "1048576"), ("--schemes", "ring,ring:2"), ("--least", "1"), ("--limit", "70"),
                 ("--json", str(tmp_path / "fa"))):
        assert fa[fa.index(pair[0]) + 1] == pair[1]
    assert "--no-single" in fa and "--full" not in fa and fa[2] == "4"
    peers = compare_parallel.peer_command(args, 4, tmp_path / "peers")
    assert peers[peers.index("--limit") + 1] == "40" and peers[peers.index("--rotate") + 1] == "alltoall"
    unlimited = compare_parallel.fa_command(compare_parallel.parse([]), 2, tmp_path / "fa")
    assert "--limit" not in unlimited and unlimited[unlimited.index("--schemes") + 1] == "all"


def test_a_killed_program_leaves_its_whole_lines(tmp_path):
    path = tmp_path / "rows"
    path.write_text(json.dumps({"kind": "machine", "gpu": "G"}) + "\n" + json.dumps(fa_row()) + "\n" + json.dumps(fa_row())[:40])
    machine, rows = parallel_rows.read_lines(path)
    assert machine["gpu"] == "G" and len(rows) == 1
    assert parallel_rows.read_lines(tmp_path / "none") == ({}, [])


def test_rows_of_a_problem_stand_together():
    efficiency = {"forward": 0.9, "forward_backward": 0.95}
    fa = [fa_row(one_ms={"forward": 7.2, "forward_backward": 30.4}, ms=TIMES, efficiency=efficiency, chosen="ring", ulysses=1),
          fa_row("ulysses", reason="h_kv"), fa_row("ring", tokens=131072, reason="memory")]
    peers = [peer_row(ms={"forward": 4.0, "forward_backward": 10.0}), peer_row("flash", reason="RuntimeError: no"),
             peer_row(tokens=131072, ms=TIMES, kv_heads="enable_gqa")]
    rows = parallel_rows.combined(fa, peers, {"commit": "c"})
    assert [row["tokens"] for row in rows] == [65536, 131072] and rows[0]["commit"] == "c"
    assert rows[0]["one_ms"]["forward"] == 7.2 and rows[1]["one_ms"] is None
    assert rows[0]["fa"]["ulysses"] == {"reason": "h_kv"} and rows[0]["peers"]["flash"] == {"reason": "RuntimeError: no"}
    assert parallel_rows.best(rows[0]["fa"], "forward") == ("ring", 2.0) and parallel_rows.best(rows[1]["fa"], "forward") is None
    text = "\n".join(line for row in rows for line in parallel_rows.describe(row))
    assert "fa ring 0.500 of it" in text and "fa ring 0.800 of it" in text and "efficiency 0.950" in text
    assert "not measured: memory" in text and "(enable_gqa)" in text


def test_other_parts_and_other_rows_of_a_file_stay():
    first = parallel_rows.merged({}, parallel_rows.combined([fa_row(ms=TIMES)], [], {}), {"gpu": "G", "templates": "t"})
    assert first["gpu"] == "G" and first["attention"] == [] and len(first["context_parallel"]) == 1
    on_disk = {**first, "attention": [{"s_q": 1}], "templates": "old", "decode": [1]}
    new = parallel_rows.combined([fa_row(ms={"forward": 1.0, "forward_backward": 2.0}), fa_row(tokens=131072, ms=TIMES)], [], {})
    second = parallel_rows.merged(on_disk, new, {"gpu": "H", "templates": "new"})
    assert {key: second[key] for key in on_disk if key != "context_parallel"} == {
        key: on_disk[key] for key in on_disk if key != "context_parallel"}
    assert [(row["tokens"], row["fa"]["ring"]["ms"]["forward"]) for row in second["context_parallel"]] == [
        (65536, 1.0), (131072, 2.0)]


def test_a_program_ends_behind_its_limit(monkeypatch, tmp_path):
    monkeypatch.setattr(compare_parallel, "GRACE", 0)
    marker = tmp_path / "pid"
    child = f"import os, subprocess, sys, time; p = subprocess.Popen(['sleep', '60']); open({str(marker)!r}, 'w').write(str(p.pid)); time.sleep(60)"
    began = time.monotonic()
    assert "limit" in compare_parallel.run([sys.executable, "-c", child], 2, dict(os.environ))
    assert time.monotonic() - began < 20
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        state = subprocess.run(["ps", "-o", "stat=", "-p", marker.read_text()], capture_output=True, text=True).stdout
        if not state or state.startswith("Z"):
            break
        time.sleep(0.1)
    else:
        pytest.fail("what the program has started still runs")
    assert compare_parallel.run(["false"], 0, dict(os.environ)) == "ended with 1"
    assert compare_parallel.run(["/nowhere"], 0, dict(os.environ)) != ""
    assert compare_parallel.run(["true"], 5, dict(os.environ)) == ""


def test_the_page_of_scale_is_written_between_its_lines(tmp_path):
    both = {"forward": 0.9, "forward_backward": 0.95}
    fa = [fa_row(one_ms={"forward": 7.2, "forward_backward": 30.4}, ms=TIMES, efficiency=both, model_ms=TIMES),
          fa_row("automatic", one_ms={"forward": 7.2, "forward_backward": 30.4}, ms=TIMES, efficiency=both),
          fa_row("ulysses", reason="h_kv")]
    rows = parallel_rows.combined(fa, [peer_row(ms={"forward": 4.0, "forward_backward": 10.0}), peer_row("flash", reason="no")],
                                  {"link_gb_s": {"one_way": 300.4, "both_ways": 250.0, "all_to_all": 240.0}, "group_us": 12.0})
    results, page = tmp_path / "r.json", tmp_path / "scale.md"
    results.write_text(json.dumps(parallel_rows.merged({}, rows, {"gpu": "G100"})))
    begin, end = scale.MEASURED
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    args = scale.parse(["table", str(results), "--page", str(page), "--model", str(tmp_path / "none")])
    for _ in range(2):
        scale.write_table(args, args.results)
        text = page.read_text()
        assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
        assert "### 4 × G100" in text and "300 GB/s" in text
        assert "| 64k | 16 / 16 | 7.2 / 30.4 | 2.0 / 8.0 | ring | 0.900 / 0.950 | 0.900 / 0.950 | 0.50 / 0.80 |" in text
        assert "flash" not in text and "automatic" not in text
    page.write_text("no lines")
    with pytest.raises(SystemExit, match="not once each"):
        scale.write_table(args, args.results)


def test_the_page_in_the_tree_can_be_written():
    page = (ROOT / "docs/scale.md").read_text()
    for lines in (scale.MODEL, scale.MEASURED):
        assert "new" in scale.replaced(page, lines, "new")
