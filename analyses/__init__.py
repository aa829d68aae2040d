"""Scripts that train a model, or write a table or a figure. See README.md."""
