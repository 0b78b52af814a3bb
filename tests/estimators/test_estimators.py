import inspect
import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, make_regression
from sklearn.linear_model import BayesianRidge
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from sklearn.utils.estimator_checks import parametrize_with_checks

import noisygrad as ng
from noisygrad import NoisyClassifier, NoisyRegressor
from noisygrad.estimators.plan import FitPlan
from noisygrad.kernels.threads import one_thread

POSTERIORS = ("diagonal", "kronecker", "eigen", "tridiagonal", "full")


@pytest.fixture(autouse=True)
def _on_one_thread():
    with one_thread():
        yield


@parametrize_with_checks([NoisyRegressor(), NoisyClassifier()])
def test_scikit_learn_contract(estimator, check):
    check(estimator)


def line(n=60, seed=0, noise=0.1):
    rng = np.random.RandomState(seed)
    X = rng.uniform(-1, 1, (n, 2))
    return X, 100 + 20 * X[:, 0] - 5 * X[:, 1] + 20 * noise * rng.randn(n)


def blobs(n=60, seed=0):
    rng = np.random.RandomState(seed)
    labels = rng.randint(3, size=n)
    return np.array([[0, 0], [3, 0], [0, 3]])[labels] + 0.5 * rng.randn(n, 2), np.array(["ant", "bee", "cat"])[labels]


def quick(kind=NoisyRegressor, *args, **options):
    return kind(*args, **{"hidden": (8,), "epochs": 30, "num_samples": 20, "random_state": 0} | options)


# ------------------------------------------------------------------------------------------------ quality


@pytest.mark.parametrize("posterior", POSTERIORS)
def test_regression_is_good_and_calibrated(posterior):
    X, y = load_diabetes(return_X_y=True)
    X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.2, random_state=3)
    model = NoisyRegressor(posterior, hidden=(20,), random_state=0).fit(X_train, y_train)
    mean, std = model.predict(X_test, return_std=True)
    rmse = np.sqrt(np.mean((mean - y_test) ** 2))
    ridge = BayesianRidge().fit(X_train, y_train).predict(X_test)
    assert rmse < 1.1 * np.sqrt(np.mean((ridge - y_test) ** 2))
    assert 0.6 < rmse / std.mean() < 1.3
    low, high = model.predict_quantiles(X_test, [0.05, 0.95])
    assert 0.8 < np.mean((low < y_test) & (y_test < high)) <= 1.0


@pytest.mark.parametrize("posterior", POSTERIORS)
def test_classification_is_good(posterior):
    X, y = load_breast_cancer(return_X_y=True)
    X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.3, random_state=0)
    model = NoisyClassifier(posterior, hidden=(20,), epochs=60, random_state=0).fit(X_train, y_train)
    assert model.score(X_test, y_test) > 0.94
    assert np.log(model.predict_proba(X_test)[np.arange(len(y_test)), y_test]).mean() > -0.2


def test_uncertainty_grows_away_from_the_data():
    X, y = line()
    model = quick(epochs=100).fit(X, y)
    _, near = model.predict([[0.0, 0.0]], return_std=True)
    _, far = model.predict([[30.0, 30.0]], return_std=True)
    assert far > 2 * near


def test_more_data_narrow_the_posterior():
    few, many = (quick(epochs=60, hidden=()).fit(*line(n)).posterior_ for n in (30, 300))
    assert many.std()["layers.0.weight"].mean() < 0.7 * few.std()["layers.0.weight"].mean()


# ------------------------------------------------------------------------------------------------ outputs


def test_predictions_are_in_the_units_of_the_targets():
    X, y = line()
    plain, scaled = quick().fit(X, y), quick().fit(X, 1e3 * y + 1e9)
    for one, other, shift in zip(plain.predict(X, True), scaled.predict(X, True), (1e9, 0.0), strict=True):
        np.testing.assert_allclose((other - shift) / 1e3, one, rtol=1e-3)
    assert scaled.elbo_ == pytest.approx(plain.elbo_ - len(X) * np.log(1e3), abs=0.5)


@pytest.mark.parametrize("outputs", [None, 1, 3])
def test_shapes(outputs):
    X, y = line()
    targets = y if outputs is None else np.stack([y * (i + 1) for i in range(outputs)], axis=1)
    model = quick().fit(X, targets)
    assert model.predict(X).shape == targets.shape
    assert model.predict(X, return_std=True)[1].shape == targets.shape
    assert model.predict_quantiles(X, 0.5).shape == targets.shape
    assert model.predict_quantiles(X, [0.1, 0.5]).shape == (2, *targets.shape)
    prediction = model.predict_distribution(X)
    assert prediction.log_prob(torch.from_numpy(targets)).shape == (len(X),)
    np.testing.assert_allclose(prediction.mean.numpy(), model.predict(X))
    if outputs == 3:
        np.testing.assert_allclose(model.predict(X)[:, 2] / 3, model.predict(X)[:, 0], rtol=0.1)


def test_predicting_in_parts_changes_nothing(monkeypatch):
    X, y = line()
    model, classifier = quick().fit(X, y), quick(NoisyClassifier).fit(*blobs())
    whole = [*model.predict(X, True), model.predict_quantiles(X, [0.2, 0.8]), classifier.predict_proba(X)]
    monkeypatch.setattr("noisygrad.estimators.estimators._OUTPUTS_AT_ONCE", 140)
    monkeypatch.setattr("noisygrad.estimators.estimators._CACHED_WEIGHTS", 0)
    model, classifier = (pickle.loads(pickle.dumps(m)) for m in (model, classifier))
    parts = [*model.predict(X, True), model.predict_quantiles(X, [0.2, 0.8]), classifier.predict_proba(X)]
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)


def test_number_of_samples_can_change_after_the_fit():
    X, y = line()
    model = quick().fit(X, y)
    assert model.predict_distribution(X).num_samples == 20
    assert model.set_params(num_samples=50).predict_distribution(X).num_samples == 50
    assert model.set_params(num_samples=5).predict_distribution(X).num_samples == 5


def test_string_labels_and_classifier_outputs():
    X, y = blobs()
    model = quick(NoisyClassifier, epochs=100).fit(X, y)
    assert list(model.classes_) == ["ant", "bee", "cat"]
    assert model.score(X, y) > 0.9
    np.testing.assert_allclose(model.predict_proba(X).sum(axis=1), 1.0)
    assert model.predict_distribution(X).mutual_information.shape == (len(X),)
    assert np.isfinite(model.elbo_)


def test_point_estimate():
    X, y = line()
    model = quick(noise=False).fit(X, y)
    assert model.predict_distribution(X).num_samples == 1
    assert np.isnan(model.elbo_)
    assert model.score(X, y) > 0.8


def test_point_noise():
    X, y = line()
    model = quick(noise_prior=None, epochs=100).fit(X, y)
    assert model.predict_distribution(X).degrees_of_freedom is None


# ------------------------------------------------------------------------------------------------ awkward data


@pytest.mark.parametrize("posterior", POSTERIORS)
@pytest.mark.parametrize("case", ["constant", "duplicate", "single", "flat target", "rare", "huge", "exact"])
def test_awkward_data_work(case, posterior):
    X, y = line(40)
    if case == "constant":
        X = np.column_stack([X, np.full(len(X), 7.3), np.zeros(len(X))])
    elif case == "duplicate":
        X = np.column_stack([X, X, X])
    elif case == "single":
        X, y = X[:1], y[:1]
    elif case == "flat target":
        y = np.full(len(X), 3.5)
    elif case == "rare":
        X = np.column_stack([X, np.eye(len(X))[0]])
    elif case == "huge":
        X = X * 1e150
    elif case == "exact":
        y = 2 * X[:, 0]
    model = quick(posterior=posterior).fit(X, y)
    mean, std = model.predict(X, return_std=True)
    assert np.isfinite(mean).all()
    assert (std > 0).all()
    assert np.abs(mean - y).max() < 10 * max(y.std(), 1.0)
    labels = (y > np.median(y)).astype(int)
    assert np.isfinite(quick(NoisyClassifier, posterior=posterior).fit(X, labels).predict_proba(X)).all()


@pytest.mark.parametrize("posterior", POSTERIORS)
def test_one_class_is_predicted(posterior):
    X, _ = blobs(10)
    model = quick(NoisyClassifier, posterior).fit(X, ["only"] * 10)
    assert set(model.predict(X + 5)) == {"only"}
    np.testing.assert_allclose(model.predict_proba(X), 1.0)


@pytest.mark.parametrize(("value", "word"), [(np.nan, "NaN"), (np.inf, "infinity"), (-np.inf, "infinity")])
@pytest.mark.parametrize("kind", [NoisyRegressor, NoisyClassifier])
def test_bad_value_is_named_by_column(value, word, kind):
    X, y = line(20)
    model = quick(kind).fit(X, y > 100)
    X[3, 1] = value
    for call in (lambda: quick(kind).fit(X, y > 100), lambda: model.predict(X)):
        with pytest.raises(ValueError, match=rf"X contains {word} in column 1 \(1 of 20 rows\)"):
            call()


def test_bad_value_is_named_by_feature_name():
    pandas = pytest.importorskip("pandas")
    X, y = line(20)
    X[3, 1] = np.nan
    with pytest.raises(ValueError, match="NaN in column 'age'"):
        quick().fit(pandas.DataFrame(X, columns=["height", "age"]), y)


def test_a_bad_target_is_named_by_column():
    X, y = line(20)
    both = np.column_stack([y, y])
    both[3, 1] = np.nan
    with pytest.raises(ValueError, match=r"y contains NaN in column 1 \(1 of 20 rows\)"):
        quick().fit(X, both)
    with pytest.raises(ValueError, match="target column 0 holds values too large"):
        quick().fit(X, y * 1e200)
    with pytest.raises(ValueError, match="feature column 0 holds values too large"):
        quick().fit(X * 1e300, y)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"posterior": "dense"}, "posterior must be one of diagonal, kronecker, eigen, tridiagonal, full; got 'dense'"),
        ({"epochs": 0}, "epochs must be an integer of at least 1, got 0"),
        ({"batch_size": 2.5}, "batch_size must be"),
        ({"num_samples": None}, "num_samples must be"),
        ({"hidden": 50}, r"hidden must be a sequence of layer widths such as \(50,\), got 50"),
        ({"hidden": (5.7,)}, r"hidden must be .* got \(5.7,\)"),
        ({"hidden": ("a",)}, r"hidden must be .* got \('a',\)"),
        ({"hidden": (5, True)}, "hidden must be"),
        ({"lr": -1.0}, "lr must be a positive number"),
        ({"prior_variance": 0.0}, "prior_variance must be positive"),
        ({"noise_prior": (1.0,)}, "noise_prior must be"),
    ],
)
def test_mistakes_are_explained(options, message):
    with pytest.raises(ValueError, match=message):
        quick(**options).fit(*line(10))


# ------------------------------------------------------------------------------------------------ citizenship


def test_deterministic_and_leaves_global_generators_alone():
    X, y = line()
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    one, other = quick().fit(X, y), quick().fit(X, y)
    np.testing.assert_array_equal(one.predict(X), other.predict(X))
    np.testing.assert_array_equal(one.predict(X), one.predict(X))
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()  # noqa: NPY002
    instance = quick(random_state=np.random.RandomState(0))
    first = instance.fit(X, y).predict(X)
    assert not np.array_equal(first, instance.fit(X, y).predict(X))
    np.testing.assert_array_equal(first, one.predict(X))


@pytest.mark.parametrize("posterior", POSTERIORS)
def test_pickle_and_clone(posterior):
    X, y = line()
    model = quick(posterior=posterior).fit(X, y)
    before = model.predict(X, return_std=True)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(before, again.predict(X, return_std=True))
    assert float(again.posterior_.kl()) == pytest.approx(float(model.posterior_.kl()))
    assert clone(model).get_params() == model.get_params()


def test_pipeline_grid_search_and_parallel_cross_validation():
    X, y = make_regression(60, 3, noise=1.0, random_state=0)
    pipeline = make_pipeline(PolynomialFeatures(include_bias=False), quick())
    search = GridSearchCV(pipeline, {"noisyregressor__prior_variance": [0.1, 1.0]}, cv=2).fit(X, y)
    assert search.best_score_ > 0.5
    one, two = (cross_val_score(quick(), X, y, cv=2, n_jobs=jobs) for jobs in (1, 2))
    np.testing.assert_allclose(one, two, rtol=1e-4)


def test_numpy_numbers_are_numbers():
    X, y = line(20)
    options = {"epochs": np.int64(2), "batch_size": np.int32(10), "mc_samples": np.int64(2), "num_samples": np.int64(3)}
    assert quick(**options, lr=np.float64(0.1), hidden=np.array([4, 3])).fit(X, y).predict(X).shape == (20,)


def test_history_and_posterior_are_kept():
    X, y = line()
    model = quick().fit(X, y)
    assert model.history_.epochs == 30
    assert model.history_.loss[-1] < model.history_.loss[0]
    assert isinstance(model.posterior_, ng.Posterior)
    assert model.posterior_.family == "kronecker"
    assert model.n_features_in_ == 2


def test_verbose_shows_progress(capsys):
    quick(verbose=True).fit(*line(10))
    assert "epoch 30/30" in capsys.readouterr().err


def test_threads_are_as_before():
    torch.set_num_threads(2)
    quick().fit(*line(10))
    assert torch.get_num_threads() == 2


def test_at_most_fifteen_parameters():
    for kind in (NoisyRegressor, NoisyClassifier):
        assert len(inspect.signature(kind).parameters) <= 15


# ------------------------------------------------------------------------------------------------ the rules


def test_plan_adapts_to_the_size():
    def plan(n, posterior="kronecker", weights=600, **given):
        found = FitPlan.of(posterior, examples=n, weights=weights, **given)
        return found, found.epochs * -(-n // found.batch_size)

    for n in (1, 10, 200, 1000, 10_000, 1_000_000):
        found, steps = plan(n)
        assert 1 <= found.batch_size <= min(n, 200)
        assert min(250 + 2 * n, 20_000) <= steps <= max(20_000 + 5000, 250 + 2 * n)
        assert 1e-4 <= found.kl_clip <= 5e-3
    assert plan(1500, "full", 4000)[1] < 250
    assert plan(1500, "full", 500)[1] > 3000
    given, _ = plan(500, epochs=7, batch_size=64, lr=0.01)
    assert (given.epochs, given.batch_size, given.lr) == (7, 64, 0.01)
