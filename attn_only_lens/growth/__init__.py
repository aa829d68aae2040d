"""Apply the expansions in `attn_only_lens.expansion` to models of all supported kinds."""

from attn_only_lens.growth._grow import Grown, grow, identity, read
from attn_only_lens.growth.grown_folder import read_provenance

__all__ = ["Grown", "grow", "identity", "read", "read_provenance"]
