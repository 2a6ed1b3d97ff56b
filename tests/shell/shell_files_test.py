"""Completions and the man page name every option of every command, are accepted by the shells, and answer."""

import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

FA = Path(sys.argv.pop(1))
PAGE = Path(sys.argv.pop(1))


def output(*command: str, text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode != 0 or done.stderr:
        raise AssertionError(f"{command[:4]}: exit {done.returncode}, {done.stderr}")
    return done.stdout


def commands_of(path: list[str]) -> dict[str, list[str]]:
    """Every command below `path` with its long options, as the help says them."""
    text = output(str(FA), *path, "--help")
    found = {" ".join(["fa", *path]): re.findall(r"^  (?:-\w,)?(--[\w-]+)", text, re.M)}
    below = re.search(r"^Subcommands:\n((?:  .*\n)*)", text, re.M)
    for name in re.findall(r"^  ([a-z]+) ", below[1], re.M) if below else []:
        found |= commands_of([*path, name])
    return found


COMMANDS = commands_of([])
BASH = output(str(FA), "completion", "bash")
ZSH = output(str(FA), "completion", "zsh")
FISH = output(str(FA), "completion", "fish")
MAN = output(str(FA), "man")


def complete_bash(*words: str) -> list[str]:
    """What bash would offer for the last of the words."""
    line = " ".join(f"'{word}'" for word in words)
    script = f"{BASH}\nCOMP_WORDS=({line}) COMP_CWORD={len(words) - 1}\n_fa\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    return output("bash", "-c", script).split()


def complete_fish(line: str) -> list[str]:
    script = f"{FISH}\ncomplete -C '{line}'"
    with tempfile.TemporaryDirectory() as home:
        answer = output("env", f"HOME={home}", "fish", "--no-config", "-c", script)
    return [entry.split("\t")[0] for entry in answer.splitlines()]


def needs(program: str):
    return unittest.skipUnless(shutil.which(program), f"{program} is not installed")


class Names(unittest.TestCase):
    def test_the_help_was_read(self) -> None:
        self.assertIn("fa cache why", COMMANDS)
        self.assertGreater(sum(map(len, COMMANDS.values())), 150)
        self.assertIn("--head-dim-v", COMMANDS["fa compile"])

    def test_bash(self) -> None:
        for command, options in COMMANDS.items():
            block = re.search(rf"^    '{command}'\)\n      options='(.*)'$", BASH, re.M)
            self.assertIsNotNone(block, command)
            self.assertLessEqual(set(options), set(block[1].split()), command)

    def test_zsh(self) -> None:
        for command, options in COMMANDS.items():
            name = "_" + command.replace(" ", "_")
            body = re.search(rf"^{name}\(\) {{\n(.*?)^}}$", ZSH, re.M | re.S)
            self.assertIsNotNone(body, command)
            for option in options:
                self.assertIn(f"){option}[", body[1], command)

    def test_fish(self) -> None:
        for command, options in COMMANDS.items():
            lines = [line for line in FISH.splitlines() if line.startswith(f"complete -c fa -n '__fa_at {command}' ")]
            for option in options:
                self.assertTrue(any(f" -l {option[2:]} " in line for line in lines), f"{command} {option}")

    def test_man(self) -> None:
        sections = dict(re.findall(r"^\.SS (.*)\n((?:(?!\.S[SH]).*\n)*)", MAN, re.M))
        for command, options in COMMANDS.items():
            body = MAN if command == "fa" else sections[command]
            for option in options:
                self.assertIn(option.replace("-", "\\-") + "\\fR", body, command)

    def test_man_has_the_variables_of_the_page(self) -> None:
        told = set(re.findall(r"`(FA_\w+)`", PAGE.read_text().split("## Environment")[1].split("\n## ")[0]))
        self.assertEqual(told, set(re.findall(r"^\\fB(FA_\w+)\\fR$", MAN, re.M)))
        self.assertGreater(len(told), 5)


class Shells(unittest.TestCase):
    @needs("bash")
    def test_bash_answers(self) -> None:
        self.assertEqual(complete_bash("fa", "ca"), ["cache"])
        self.assertEqual(complete_bash("fa", "cache", "ex"), ["export"])
        self.assertEqual(complete_bash("fa", "completion", ""), ["bash", "zsh", "fish"])
        self.assertEqual(complete_bash("fa", "compile", "--causal-a"), ["--causal-align"])
        self.assertEqual(complete_bash("fa", "compile", "--causal", "b"), ["both"])
        self.assertEqual(complete_bash("fa", "compile", "--dtype", "f16,b"), ["f16,bf16"])
        self.assertEqual(complete_bash("fa", "compile", "--causal", "=", "y"), ["yes"])
        self.assertIn("decode-split", complete_bash("fa", "pack", "--shapes", ""))
        # An option's value is no command.
        self.assertEqual(complete_bash("fa", "bench", "--op", "append", "--hos"), ["--host-cost"])

    @needs("zsh")
    def test_zsh_reads(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "_fa").write_text(ZSH)
            output("zsh", "-f", "-n", f"{folder}/_fa")
            script = f"fpath=({folder} $fpath); autoload -U compinit; compinit -D -u; print $_comps[fa]"
            self.assertEqual(output("zsh", "-f", "-c", script), "_fa\n")

    @needs("fish")
    def test_fish_answers(self) -> None:
        self.assertEqual(complete_fish("fa ca"), ["cache"])
        self.assertEqual(complete_fish("fa cache ex"), ["export"])
        self.assertEqual(complete_fish("fa compile --causal b"), ["both"])
        self.assertIn("--head-dim-v", complete_fish("fa compile --head-d"))

    @needs("groff")
    def test_man_page_formats_without_a_warning(self) -> None:
        text = output("groff", "-ww", "-man", "-Tutf8", "-P-c", "-P-b", "-P-u", text=MAN)
        self.assertIn("fa cache export", text)


if __name__ == "__main__":
    unittest.main()
