"""A table of numbers: scikit-learn estimators with error bars."""

import numpy as np
from sklearn.datasets import load_diabetes, load_iris
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures

from noisygrad import NoisyClassifier, NoisyRegressor

X, y = load_diabetes(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.2, random_state=0)
regressor = NoisyRegressor(random_state=0, epochs=60).fit(X_train, y_train)
mean, std = regressor.predict(X_test, return_std=True)
low, high = regressor.predict_quantiles(X_test, [0.05, 0.95])
print(f"RMSE {np.sqrt(np.mean((mean - y_test) ** 2)):.1f}, mean error bar {std.mean():.1f}")
print(f"{np.mean((low < y_test) & (y_test < high)):.0%} of the targets lie in their 90 % interval")

X, y = load_iris(return_X_y=True, as_frame=False)
names = np.array(["setosa", "versicolor", "virginica"])[y]
pipeline = make_pipeline(PolynomialFeatures(include_bias=False), NoisyClassifier(epochs=30, random_state=0))
search = GridSearchCV(pipeline, {"noisyclassifier__prior_variance": [0.1, 1.0]}, cv=3, scoring="neg_log_loss")
search.fit(X, names)
print(f"best setting {search.best_params_}, log loss {-search.best_score_:.3f}")
