"""What evaluation protocols look at: deterministic views, subsets of a data set, published ground truth."""
