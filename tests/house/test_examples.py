"""Every example runs, and prints what its docstring promises."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, *arguments: object) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # other tests are running
    command = [sys.executable, EXAMPLES / name, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ten_lines():
    found = re.search(r"accuracy ([\d.]+)\nlog-likelihood (-[\d.]+)", run("ten_lines.py"))
    assert float(found[1]) > 0.93
    assert float(found[2]) > -0.3


def test_scikit_learn():
    output = run("scikit_learn.py")
    assert 50 < float(re.search(r"RMSE ([\d.]+)", output)[1]) < 70
    assert 80 < float(re.search(r"(\d+)% of the targets", output)[1]) <= 100


def test_continual_learning_remembers_with_the_posterior_as_prior():
    (forgot, new), (kept, learned) = re.findall(r"0-4 ([\d.]+), on the digits 5-9 ([\d.]+)", run("continual.py"))
    assert float(forgot) < 0.2
    assert float(kept) > 0.6
    assert min(float(new), float(learned)) > 0.85


def test_active_learning_beats_chance():
    rows = re.findall(r"^(?:random|suggest)((?: +[\d.]+){4})$", run("active_learning.py"), re.MULTILINE)
    by_chance, suggested = ([float(value) for value in row.split()] for row in rows)
    assert by_chance[0] == suggested[0]
    assert suggested[-1] < 0.8 * by_chance[-1]


def test_curiosity_finds_what_chance_does_not():
    for module in ("Box2D", "gymnasium", "sb3_contrib"):
        pytest.importorskip(module)
    alone, curious = re.findall(r"found in (\d+) of", run("curiosity.py"))
    assert int(alone) == 0
    assert int(curious) > 0


def test_the_readme_does_what_it_says(tmp_path):
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    program = tmp_path / "readme.py"
    program.write_text(re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[0], encoding="utf-8")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True, timeout=300)
    assert float(re.search(r"accuracy ([\d.]+)", done.stdout)[1]) > 0.9


def test_every_example_is_tested():
    tested = re.findall(r'run\("(\w+\.py)"', Path(__file__).read_text(encoding="utf-8"))
    assert sorted(tested) == sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_example_is_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60


@pytest.mark.parametrize("task", ["CartPoleSwingup", "MountainCar", "DoublePendulum"])
def test_watching_an_episode(task, tmp_path):
    for extra in ("Box2D", "gymnasium", "sb3_contrib"):
        pytest.importorskip(extra)
    output = run("watch.py", "--task", task, "--output", tmp_path / "episode.gif")
    assert float(re.search(rf"{task}: reward (\d+) after \d+ steps", output)[1]) >= 1
    written = (tmp_path / "episode.gif").read_bytes()
    assert written.startswith(b"GIF89a")
    assert len(written) < 400_000
