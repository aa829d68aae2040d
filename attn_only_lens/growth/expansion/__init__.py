"""Six ways to enlarge a transformer without changing the function that it computes.

Source: Gesmundo and Maile, "Composable Function-preserving Expansions for Transformer
Architectures" (the growth paper), theorems 3.1 to 3.6. `attn_only_lens.grow` applies these
expansions to models.
"""
