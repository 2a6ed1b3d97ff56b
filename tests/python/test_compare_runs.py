"""examples/llm_c/compare_runs.py, of logs in llm.c's words."""

import math
import pathlib
import re
import subprocess
import sys

import pytest

TOOL = pathlib.Path(__file__).resolve().parent.parent.parent / "examples" / "llm_c" / "compare_runs.py"


def log(folder, name, training, validation, milliseconds=60.0, steps=20, of=20):
    lines = ["val loss 11.0"]
    for step in range(1, steps + 1):
        slow = 500.0 if step <= 10 else milliseconds
        lines.append(f"step {step:4d}/{of} | loss {training if step == of else 9.5:.6f} (+nanz)| norm 1.0000 (+0.10z)"
                     f"| lr 3.00e-04 | {slow:.2f} ms | 40.0% bf16 MFU | 540000 tok/s")
    (folder / f"{name}.log").write_text("\n".join([*lines, f"val loss {validation:f}", "total average iteration time: 60 ms"]))


def compared(folder, *options):
    run = subprocess.run([sys.executable, TOOL, folder, "--base", "cudnn", *options], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    rows = {}
    for line in run.stdout.splitlines():
        found = re.match(r"(.*?)  +(training|validation) +(.*)", line)
        if found:
            rows[found[1], found[2]] = [float(word) for word in found[3].split()]
    return run.stdout, rows


def test_differences_are_paired_by_stream(tmp_path):
    for stream, (theirs, ours) in enumerate([(4.0, 4.001), (5.0, 5.003), (3.0, 3.002)]):
        log(tmp_path, f"cudnn-{stream:02d}", theirs, theirs + 1)
        log(tmp_path, f"fa-{stream:02d}", ours, ours + 0.999, 57.5)
    text, rows = compared(tmp_path, "--timed", "00,02")
    assert rows["fa less cudnn", "training"] == [3, 2.0, round(1 / math.sqrt(3), 2), 1.0, 3.0]
    assert rows["fa less cudnn", "validation"] == [3, 1.0, round(1 / math.sqrt(3), 2), 1.0, 2.0]
    assert "step 57.50 57.50 ms" in text and "step 60.00 60.00 ms" in text


def test_runs_of_a_stream_are_averaged_and_compared(tmp_path):
    log(tmp_path, "cudnn-00", 4.0, 5.0)
    log(tmp_path, "fa-00-1", 4.004, 5.0)
    log(tmp_path, "fa-00-2", 4.002, 5.0)
    _, rows = compared(tmp_path)
    assert rows["fa less cudnn", "training"][:2] == [1, 3.0]
    assert rows["fa, run less run", "training"][:2] == [1, -2.0]


def test_a_run_that_has_not_ended_is_left_out(tmp_path):
    log(tmp_path, "cudnn-00", 4.0, 5.0)
    log(tmp_path, "fa-00", 4.5, 5.0)
    log(tmp_path, "fa-01", 4.5, 5.0, steps=19)
    text, rows = compared(tmp_path)
    assert "fa-01.log has not ended" in text and rows["fa less cudnn", "training"][:2] == [1, 500.0]


def test_a_loss_that_is_no_number_shows(tmp_path):
    log(tmp_path, "cudnn-00", 4.0, 5.0)
    log(tmp_path, "fa-00", math.nan, 5.0)
    _, rows = compared(tmp_path)
    assert math.isnan(rows["fa less cudnn", "training"][1])


@pytest.mark.parametrize("name", ["fa-00", "cudnn-00"])
def test_one_build_is_no_comparison(tmp_path, name):
    log(tmp_path, name, 4.0, 5.0)
    run = subprocess.run([sys.executable, TOOL, tmp_path, "--base", "cudnn"], capture_output=True, text=True)
    assert run.returncode != 0 and "no ended run" in run.stderr
