"""Pure scorers of features: nearest neighbours, clustering, classifiers, rankings, matching, feature health."""
