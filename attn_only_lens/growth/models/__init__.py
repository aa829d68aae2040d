"""Apply the expansions in `attn_only_lens.growth` to models of all supported kinds."""
