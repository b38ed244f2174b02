"""Drawing images: contact sheets, sprite sheets and the two-dimensional map of features."""
