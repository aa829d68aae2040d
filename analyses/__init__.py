"""Scripts that make a model, a table or a figure; see README.md."""
