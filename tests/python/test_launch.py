"""examples/context_parallel/launch.py with plain processes: what each rank is told, and what becomes of ranks that fail."""

import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

LAUNCHER = pathlib.Path(__file__).resolve().parents[2] / "examples" / "context_parallel" / "launch.py"
_spec = importlib.util.spec_from_file_location("launch", LAUNCHER)
launch = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(launch)

START = "import os, pathlib, sys, time\nrank = int(os.environ['RANK'])\nfolder = pathlib.Path(sys.argv[1])\n"


def launched(count, text, folder, *options):
    return subprocess.run([sys.executable, str(LAUNCHER), str(count), sys.executable, "-c", START + text, str(folder), *options],
                          capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_rank_is_told_who_it_is(tmp_path, count):
    done = launched(count, "(folder / str(rank)).write_text(' '.join(os.environ[name] for name in "
                           "('LOCAL_RANK', 'WORLD_SIZE', 'FA_RENDEZVOUS')) + ' ' + ' '.join(sys.argv[2:]))", tmp_path, "--a", "b")
    assert done.returncode == 0, done.stderr
    told = [(tmp_path / str(rank)).read_text().split() for rank in range(count)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(map(str, range(count)))
    assert [words[:2] for words in told] == [[str(rank), str(count)] for rank in range(count)]
    assert len({words[2] for words in told}) == 1, "all share a file"
    assert all(words[3:] == ["--a", "b"] for words in told)
    assert not pathlib.Path(told[0][2]).parent.exists(), "its folder is removed"


def test_ranks_meet_by_the_file(tmp_path):
    done = launched(3, "file = pathlib.Path(os.environ['FA_RENDEZVOUS'])\n"
                       "part = file.with_suffix('.part')\n"
                       "if rank == 0: time.sleep(0.3); part.write_text('id'); part.rename(file)\n"
                       "while not file.exists(): time.sleep(0.02)\n"
                       "(folder / str(rank)).write_text(file.read_text())", tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["id"] * 3


def test_a_status_is_that_of_the_rank_that_failed_first(tmp_path):
    assert launched(3, "time.sleep(0 if rank == 2 else 0.6)\nsys.exit({0: 5, 1: 0, 2: 77}[rank])", tmp_path).returncode == 77
    assert launched(2, "os.kill(os.getpid(), 6) if rank == 1 else None", tmp_path).returncode == 128 + signal.SIGABRT


def test_a_rank_that_fails_ends_those_that_wait(tmp_path):
    text = "if rank == 1: sys.exit(3)\n(folder / 'pid').write_text(str(os.getpid()))\ntime.sleep(60)"
    command = [sys.executable, "-c", START + text, str(tmp_path)]
    begin = time.monotonic()
    assert launch.run(2, command, grace=1) == 3
    assert 1 <= time.monotonic() - begin < 30
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_others_have_time_to_say_why(tmp_path):
    text = "if rank == 0: sys.exit(4)\ntime.sleep(0.5)\n(folder / 'said').write_text('rank 0 has left')\nsys.exit(1)"
    assert launch.run(2, [sys.executable, "-c", START + text, str(tmp_path)], grace=20) == 4
    assert (tmp_path / "said").read_text() == "rank 0 has left"


def test_an_interrupted_launcher_leaves_no_process(tmp_path):
    text = START + "(folder / str(rank)).write_text(str(os.getpid()))\ntime.sleep(60)"
    launcher = subprocess.Popen([sys.executable, str(LAUNCHER), "2", sys.executable, "-c", text, str(tmp_path)],
                                stderr=subprocess.DEVNULL)
    until = time.monotonic() + 30
    while not all((tmp_path / str(rank)).exists() and (tmp_path / str(rank)).read_text() for rank in range(2)):
        assert time.monotonic() < until
        time.sleep(0.05)
    launcher.send_signal(signal.SIGINT)  # to it alone, not to its ranks
    assert launcher.wait(timeout=30) != 0
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / str(rank)).read_text()), 0)


def test_a_program_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        launch.run(2, [str(tmp_path / "nothing")])


@pytest.mark.parametrize("words", [[], ["2"], ["0", "true"], ["-1", "true"], ["two", "true"]])
def test_bad_words_are_refused_with_the_usage(words):
    done = subprocess.run([sys.executable, str(LAUNCHER), *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "launch.py 2 build/release/examples/fa_example_two_gpus" in done.stderr
