"""Runs the README's shell and Python blocks, in order, in a fresh clone; trainings are cut short by overrides."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHORT = "--training.steps 20 --training.eval-every 10 --training.batch-size 4 --training.epochs None"
ALREADY_RUN = {"make test"}


def shorten(line: str) -> str:
    """`line` with the settings of a run of seconds, if it trains."""
    if line.startswith("make train"):
        return f'{line} ARGS="{SHORT}"'
    if not re.search(r"train(\.py)? --config", line):
        return line
    return f"{line} {SHORT}" + (" --task.sample-tokens 20" if "gpt" in line else "")


def main() -> None:
    blocks = re.findall(r"^```(sh|python)\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert blocks, "the README has no blocks to run"
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        for language, block in blocks:
            if language == "sh":
                lines = [line for line in block.replace("\\\n", " ").splitlines() if line not in ALREADY_RUN]
                # Every block after an installation uses what that installed.
                script = "[ ! -f .venv/bin/activate ] || . .venv/bin/activate\n" + "\n".join(map(shorten, lines))
                command = ["bash", "-euxc", script]
            else:
                print(block)
                command = [str(clone / ".venv/bin/python"), "-c", block]
            result = subprocess.run(command, cwd=clone)
            if result.returncode:
                sys.exit(f"this block of the README failed with exit code {result.returncode}:\n{block}")


if __name__ == "__main__":
    main()
