"""Classification end to end on digits: every method, resumption, bad input; augmentation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from noisygrad.cli.main import main
from noisygrad.training.checkpoint import CheckpointError
from noisygrad.training.history import EpochRecord
from noisygrad_paper.data import load_images, subset
from noisygrad_paper.experiments import calibration, classification
from noisygrad_paper.experiments.cells import Results
from noisygrad_paper.experiments.classification import Learning, held_out, plan, random_crop, run_job
from noisygrad_paper.experiments.configurations import CONFIGURATIONS, full_name, has
from noisygrad_paper.experiments.image_methods import METHODS, schedule, settings


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["reproduce", "classification", *map(str, arguments)])
    return done.exit_code, done.output


def quiet(fraction: float, text: str) -> None:
    pass


@pytest.mark.parametrize("configuration", ["plain", "D+B"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_digits(method: str, configuration: str) -> None:
    (job,) = plan("digits", [method], [configuration], epochs=3, train_size=800)
    (cell,) = run_job(job, quiet)
    assert cell.error is None
    figures = cell.metrics
    assert len(figures["test_accuracy"]) == len(figures["train_loss"]) == len(figures["epochs"]) == 3
    assert figures["train_loss"][-1] < figures["train_loss"][0]
    for mean, median, largest in zip(
        figures["train_loss"], figures["train_loss_median"], figures["train_loss_largest"], strict=True
    ):
        assert max(mean, median) <= largest
        assert median > 0
    assert figures["accuracy"] > 30
    assert len(figures["bin_share"]) == 15
    assert sum(figures["bin_share"]) == pytest.approx(1.0)
    gaps = np.abs(np.subtract(figures["bin_confidence"], figures["bin_accuracy"]))
    assert float(np.dot(figures["bin_share"], gaps)) == pytest.approx(figures["ece"], abs=1e-3)
    assert len(figures["contrast_nll"]) == 5
    if method in {"SGD", "K-FAC", "K-FAC+WD"}:
        assert figures["accuracy"] == pytest.approx(figures["accuracy_of_mean_weights"])
    elif configuration == "D+B":
        assert figures["accuracy_own_norm"] > 30
        assert figures["nll_own_norm"] != figures["nll"]
    assert ("ece_own_norm" in figures) == (configuration == "D+B" and method in {"BBB", "noisy-Adam", "noisy-K-FAC"})


def test_a_killed_training_goes_on_at_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = plan("digits", ["noisy-K-FAC"], ["D+B"], epochs=4, train_size=400)
    (whole,) = run_job(job, quiet)

    def stop(fraction: float, text: str) -> None:
        if fraction > 0.5:
            raise KeyboardInterrupt

    folder = str(tmp_path / "checkpoints")
    with pytest.raises(KeyboardInterrupt):
        run_job(job, stop, checkpoints=folder)
    (kept,) = Path(folder).iterdir()
    epochs = []
    (again,) = run_job(job, lambda fraction, text: epochs.append(text), checkpoints=folder)
    assert [text for text in epochs if "epoch" in text] == ["seed 0, epoch 3 of 4", "seed 0, epoch 4 of 4"]
    assert epochs[2] == "seed 0, measuring: test images"
    assert epochs[-1] == "seed 0, measuring: contrast 5"
    for name, value in whole.metrics.items():
        if name != "step_ms":
            assert again.metrics[name] == value, name
    (Path(folder) / f".{kept.name}.a1b2.part").touch()  # what a kill in the middle of writing leaves
    (Path(folder) / "other.safetensors").touch()
    classification.clear_checkpoints(job, folder)
    assert [path.name for path in Path(folder).iterdir()] == ["other.safetensors"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"methods": ["SGD"], "configurations": ["D"]}, "is of a run with method = SGD, this one has SGD/D"),
        ({"methods": ["SGD"], "configurations": ["plain"], "epochs": 2}, "with epochs = 3, this one has 2"),
        (
            {"methods": ["SGD"], "configurations": ["plain"], "train_size": 500},
            "with num_data = 400, this one has 500",
        ),
    ],
)
def test_a_checkpoint_of_another_configuration_is_refused(other: dict, message: str, tmp_path: Path) -> None:
    (job,) = plan("digits", ["SGD"], ["plain"], epochs=3, train_size=400)
    learning = Learning(job, 0, subset(load_images("digits"), 400, 0), "cpu")
    learning.train(lambda record: {"test_accuracy": 0.0, **learning.losses()}, tmp_path / "kept", 1)
    (wrong,) = plan("digits", **({"epochs": 3, "train_size": 400} | other))
    (tmp_path / "kept").rename(tmp_path / f"{classification._file_name(wrong, 0)}.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(message)):
        run_job(wrong, quiet, checkpoints=str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 1


def test_other_settings_have_another_checkpoint() -> None:
    names = {
        classification._file_name(job, seed)
        for job in plan("digits", ["noisy-K-FAC", "K-FAC"]) + plan("digits", ["noisy-K-FAC"], epochs=7)
        for seed in (0, 1)
    }
    assert len(names) == 2 * (4 + 4 + 4)


def test_the_command_resumes_and_shows_a_table(tmp_path: Path) -> None:
    arguments = ("--data", "digits", "--methods", "SGD", "--configurations", "plain,B", "--epochs", 2, "--results")
    code, output = run(*arguments, tmp_path)
    assert code == 0, output
    assert "SGD/B" in output
    path = Results(tmp_path, "classification").path
    lines = path.read_text()
    assert not (tmp_path / "checkpoints").exists(), "what is stored needs no checkpoint"
    code, output = run(*arguments, tmp_path)
    assert code == 0, output
    assert path.read_text() == lines
    code, output = run(*arguments[:-3], "--epochs", 3, "--results", tmp_path)
    assert code == 2
    assert "epochs" in output


def test_validation_never_sees_the_test_images(tmp_path: Path) -> None:
    images = load_images("digits")
    held = held_out(images)
    assert np.array_equal(np.concatenate([held.x_train, held.x_test]), images.x_train)
    arguments = ("--data", "digits", "--methods", "SGD", "--configurations", "plain", "--epochs", 1, "--validation")
    for more in ((), ("--set", "lr=0.02")):
        code, output = run(*arguments, *more, "--results", tmp_path)
        assert code == 0, output
    cells = Results(tmp_path, "classification-validation").load()
    assert [cell.method for cell in cells] == ["SGD", "SGD lr=0.02"]
    assert not Results(tmp_path, "classification").path.exists()
    code, output = run(*arguments[:-1], "--set", "lr=0.02", "--results", tmp_path)
    assert code == 2
    assert "validation" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "SDG"), "noisy-K-FAC"),
        (("--configurations", "C"), "D+B"),
        (("--data", "imagenet"), "cifar10"),
        (("--device", "gpu"), "cuda"),
        (("--device", "meta"), "give cpu, cuda"),
        (("--data", "digits", "--checkpoints", __file__), "is a file: name a folder"),
        (("--data", "digits", "--train-size", "5"), "class"),
    ],
)
def test_a_wrong_argument_is_explained(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    code, output = run("--results", tmp_path / "r", *arguments)
    assert code != 0
    assert message in output
    assert "Traceback" not in output
    assert not (tmp_path / "r" / "classification.jsonl").exists()


def test_missing_images_name_the_command_that_fetches_them(tmp_path: Path) -> None:
    code, output = run("--data-dir", tmp_path, "--results", tmp_path / "r", "--methods", "SGD")
    assert code != 0
    assert "noisygrad data fetch cifar10" in output


def test_settings_are_the_released_ones() -> None:
    for configuration, intrinsic in {"plain": 1e-4, "D": 2e-5, "B": 1e-5, "D+B": 2e-6}.items():
        found = settings("noisy-K-FAC", configuration)
        assert found["kl_weight"] / (50000 * found["prior_variance"]) == pytest.approx(intrinsic)
        # Weight decay of the same size, and none.
        assert settings("K-FAC+WD", configuration) == found | {"noise": False, "test_samples": 1}
        assert settings("K-FAC", configuration)["prior_variance"] is None
    assert json.loads(json.dumps(settings("BBB", "plain"))) == settings("BBB", "plain")
    with pytest.raises(ValueError, match=r"there is no method .* noisy-Adam"):
        settings("Adam", "plain")


def test_a_network_in_bfloat16_keeps_float32_weights() -> None:
    (job,) = plan("digits", ["noisy-K-FAC"], ["B"], bf16=True, epochs=1)
    assert job.method == "noisy-K-FAC/B/bf16"
    learning = Learning(job, 0, load_images("digits", None), "cpu")
    seen = []
    learning.network.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    learning.model.train()
    loss = learning._step(learning.x_train[: learning.batch_size], learning.y_train[: learning.batch_size])
    assert set(seen) == {torch.bfloat16}
    assert loss.dtype == torch.float32
    assert {parameter.dtype for parameter in learning.network.parameters()} == {torch.float32}


def test_names_of_cells() -> None:
    assert full_name("K-FAC", "plain") == "K-FAC"
    assert full_name("K-FAC/learned-norm", "D+B") == "K-FAC/D+B/learned-norm"
    assert [has(name, "D") for name in ("plain", "D", "B", "D+B")] == [False, True, False, True]
    jobs = plan("cifar10", ["K-FAC"], learned_norm=True)
    assert [job.method for job in jobs] == ["K-FAC", "K-FAC/D", "K-FAC/B/learned-norm", "K-FAC/D+B/learned-norm"]
    assert [(job.config["augment"], job.config["batch_norm"]) for job in jobs] == [
        (False, False),
        (True, False),
        (False, True),
        (True, True),
    ]


def test_a_crop_is_a_piece_of_the_padded_image() -> None:
    images = torch.arange(1, 4 * 2 * 6 * 6 + 1, dtype=torch.uint8).view(4, 2, 6, 6)
    generator = torch.Generator().manual_seed(0)
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    seen = set()
    for _ in range(60):
        found = random_crop(images, 2, flip=True, generator=generator)
        for number, image in enumerate(found):
            matches = [
                (row, column, mirrored)
                for row in range(5)
                for column in range(5)
                for mirrored in (False, True)
                if torch.equal(image, _piece(padded[number], row, column, mirrored))
            ]
            assert matches
            seen.update(matches)
    assert len(seen) == 50, "every place, and mirrored or not"


def _piece(padded: torch.Tensor, row: int, column: int, mirrored: bool) -> torch.Tensor:
    # A mirrored image is padded on both sides alike, so it is mirrored first or last.
    base = padded.flip(-1) if mirrored else padded
    return base[:, row : row + 6, column : column + 6]


def test_without_padding_or_flip_nothing_changes() -> None:
    images = torch.rand(3, 1, 8, 8)
    assert torch.equal(random_crop(images, 0, flip=False), images)


@pytest.mark.parametrize(("method", "lr", "epochs"), [("BBB", 1e4, 3), ("SGD", 1e6, 3), ("SGD", 1e20, 1)])
def test_a_training_that_diverges_is_a_cell_that_says_so(method: str, lr: float, epochs: int) -> None:
    (job,) = plan("digits", [method], ["plain"], epochs=epochs, train_size=400, validation=True, changes={"lr": lr})
    (cell,) = run_job(job, quiet)
    assert cell.error is not None
    assert cell.metrics == {}


def test_the_trainer_follows_the_released_protocol() -> None:
    (job,) = plan("digits", ["noisy-K-FAC"], ["D+B"], train_size=400)
    learning = classification.Learning(job, 0, subset(load_images("digits"), 400, 0), "cpu")
    optimizer = learning.trainer.optimizer
    options, steps = optimizer.options, 400 // 32
    assert options.fisher_pass == "fresh"
    assert options.momentum_mode == "heavy_ball"
    assert options.num_data == 400
    assert options.clip_at(steps) == pytest.approx(1e-2)
    assert options.clip_at(steps + 1) == pytest.approx(0.95e-2)
    assert not any(name.endswith(("1.weight", "5.weight")) for name in optimizer.structure.parameters), "scales stay 1"


@pytest.mark.parametrize("configuration", ["plain", "D"])
def test_only_augmented_images_change(configuration: str) -> None:
    (job,) = plan("digits", ["SGD"], [configuration], train_size=400)
    learning = classification.Learning(job, 0, subset(load_images("digits"), 400, 0), "cpu")
    learning._prepare()
    expected = learning.normalise(learning._raw.float() / 255.0)
    assert torch.equal(learning._inputs, expected) == (configuration == "plain")


def test_the_learning_rate_drops() -> None:
    (job,) = plan("digits", ["SGD"], ["plain"], epochs=4, train_size=400)
    learning = classification.Learning(job, 0, subset(load_images("digits"), 400, 0), "cpu")
    seen = []
    learning.train(lambda record: seen.append(learning.trainer.optimizer.param_groups[0]["lr"]) or {}, None, 1)
    assert seen == pytest.approx([0.05, 0.005, 0.0005, 0.0005])


@pytest.mark.parametrize(("epochs", "expected"), [(1, []), (3, [1, 2]), (30, [15, 22]), (150, [75, 112])])
def test_both_drops_are_made_however_short_the_training(epochs: int, expected: list[int]) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = schedule(optimizer, {"epochs": epochs, "lr_drops": [0.5, 0.75]})
    factors = [scheduler.lr_lambdas[0](epoch) for epoch in range(epochs)]
    drops = [epoch for epoch in range(1, epochs) if factors[epoch] < factors[epoch - 1]]
    assert drops == expected
    assert factors[-1] == pytest.approx(0.1 ** len(expected))


def test_weight_decay_of_sgd_can_be_tried() -> None:
    plain, decayed = (
        plan("digits", ["SGD"], ["plain"], train_size=400, validation=True, changes=changes)[0]
        for changes in ({}, {"weight_decay": 0.1})
    )
    for job, expected in ((plain, 0.0), (decayed, 0.1)):
        learning = classification.Learning(job, 0, subset(load_images("digits"), 400, 0), "cpu")
        assert learning.trainer.optimizer.param_groups[0]["weight_decay"] == expected
    with pytest.raises(ValueError, match="weight_decay"):
        plan("digits", ["BBB"], ["plain"], validation=True, changes={"weight_decay": 0.1})


def test_the_learning_rate_rises_during_a_warm_up(tmp_path: Path) -> None:
    changes = {"warm_up": 3, "lr_drops": [0.75]}
    (job,) = plan("digits", ["SGD"], ["plain"], epochs=4, train_size=400, validation=True, changes=changes)
    data, seen = subset(load_images("digits"), 400, 0), []

    def train(last: int) -> None:
        learning = classification.Learning(job, 0, data, "cpu")

        def note(record: EpochRecord) -> dict[str, float]:
            if record.epoch > last:
                raise KeyboardInterrupt
            seen.append(learning.trainer.optimizer.param_groups[0]["lr"])
            return {}

        learning.train(note, tmp_path / "checkpoint.safetensors", 1)

    with pytest.raises(KeyboardInterrupt):
        train(2)
    train(4)  # goes on with the schedule where it was
    assert seen == pytest.approx([0.025, 0.0375, 0.005, 0.005])


def test_scores_by_the_number_of_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "DRAWS", (1, 4))
    (job,) = plan("digits", ["noisy-K-FAC"], ["plain"], epochs=1)
    learning = Learning(job, 0, load_images("digits", None), "cpu")
    posterior, asked = learning.trainer.posterior(), (learning.x_test[:50], learning.y_test[:50], learning.normalise)
    found = calibration.by_draws(posterior, *asked)
    assert found["draws"] == [1.0, 4.0]
    alone = calibration.measured(posterior, *asked, samples=4)
    assert found["ece_by_draws"][1] == pytest.approx(alone["ece"])
    assert found["accuracy_by_draws"][1] == pytest.approx(alone["accuracy"])
    assert found["nll_by_draws"][0] != found["nll_by_draws"][1]
    assert calibration.nll_of_draws(posterior, *asked, samples=4)[0] == pytest.approx(found["nll_by_draws"][0])


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("SGD", {"lr": -1}),
        ("SGD", {"momentum": 1.5}),
        ("SGD", {"weight_decay": -1.0}),
        ("SGD", {"lr_drops": [2.0]}),
        ("SGD", {"warm_up": -1}),
        ("BBB", {"initial_std": 0.0}),
        ("BBB", {"test_samples": 0}),
        ("noisy-Adam", {"kl_clip_decay": -0.9}),
        ("noisy-K-FAC", {"prior_variance": -1}),
        ("noisy-K-FAC", {"safeguard": "never"}),
    ],
)
def test_an_impossible_value_is_refused_before_anything_starts(method: str, changes: dict[str, object]) -> None:
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=next(iter(changes))):
        plan("digits", [method], ["plain"], validation=True, changes=changes)
    plan("digits", METHODS, tuple(CONFIGURATIONS), validation=True, changes={"lr": 0.5})
    assert torch.equal(torch.get_rng_state(), state)
