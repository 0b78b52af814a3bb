"""Regression and classification of tables with the interface of scikit-learn."""

from noisygrad.estimators.estimators import NoisyClassifier, NoisyRegressor

__all__ = ["NoisyClassifier", "NoisyRegressor"]
