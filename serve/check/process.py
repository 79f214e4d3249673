"""Golden runs in a new process (law L5).

    python -m serve.check.process

Reads a setting as JSON from standard input and writes what the cases `ELSEWHERE` give there: one
JSON object, the golden runs or what is wrong with the model.
"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

from serve.check.cases import make_cases
from serve.check.golden import Golden, golden_runs
from serve.check.laws import ELSEWHERE
from serve.check.setting import Setting

# The folder that the packages are in, so that the new process imports the same ones.
_ROOT = Path(__file__).parents[2]


def golden_elsewhere(setting: Setting) -> list[Golden]:
    """What a new process gives for the cases `ELSEWHERE`.

    Call it before this process uses an accelerator, which may leave no memory for another.

    Raises:
      ValueError: the model cannot be run. RuntimeError: the process died.
    """
    # Relative paths are this process's.
    there = dataclasses.replace(setting, directory=str(Path(setting.directory).resolve()))
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(dataclasses.asdict(there)),
        stdout=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the new process ended with exit code {done.returncode}")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise ValueError(answer["error"])
    return [Golden.from_json(data) for data in answer["golden"]]


def main() -> None:
    """Answer the process that started this one."""
    setting = Setting(**json.load(sys.stdin))
    try:
        runs = golden_runs(setting, make_cases(setting)[ELSEWHERE])
        answer = {"golden": [run.to_json() for run in runs]}
    except (ValueError, OSError, NotImplementedError, MemoryError) as error:
        answer = {"error": str(error)}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
